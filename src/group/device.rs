//! Calls of a group on GPUs.

use super::Group;
use crate::coll::call::{Call, CallSpec, Collective, Span};
pub use crate::coll::cuda::communicator::CudaTarget;
use crate::coll::cuda::communicator::{CallStage, Communicator};
pub use crate::coll::message::DeviceMessage;
use crate::error::{Error, Result};
use crate::health::DeviceSlot;
use crate::internode::cuda::IntraNode;
use crate::kernels::cuda::driver::Stream;
use crate::lock::{lock, unpoisoned};
use crate::rank::Rank;
use crate::sync::timeout::CallTimeout;
use crate::sys::{interrupt, thread};
use crate::trace;
use crate::window::{RendezvousContext, SymmetricWindow};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Group {
    /// Returns torch's index of the device on which this rank's memory of the group is set up.
    pub fn device(&self) -> Option<i32> {
        self.health.communicator().map(|communicator| communicator.device())
    }

    /// Sets up the group's memory on `device`. Collective: blocks until all ranks have called this
    /// function or `launch`. Idempotent.
    pub fn connect(&self, device: i32) -> Result<()> {
        self.check_open()?;
        match &self.internode {
            Some(internode) => internode.connect(self, device, self.timeout()),
            None => self.connected(device, self.timeout()).map(|_| ()),
        }
    }

    fn connected(&self, device: i32, timeout: Duration) -> Result<Arc<Communicator>> {
        self.check_open()?;
        let communicator = match self.health.communicator() {
            Some(communicator) => communicator,
            None => self.set_up(device, timeout)?,
        };
        if communicator.device() != device {
            let (name, first) = (self.control.name(), communicator.device());
            return Err(Error::value(format!(
                "group \"{name}\" works on cuda:{first}, this tensor is on cuda:{device}; a group \
                 has one GPU per rank"
            )));
        }
        Ok(communicator)
    }

    #[cold]
    fn set_up(&self, device: i32, timeout: Duration) -> Result<Arc<Communicator>> {
        // This is not the communicator's own lock, because threads that query failures or leave
        // must not wait for absent peers.
        let _turn = lock(&self.setting_up);
        if let Some(communicator) = self.health.communicator() {
            return Ok(communicator);
        }
        self.check_alive()?;
        let limit = CallTimeout::from(Instant::now(), timeout);
        let communicator =
            Arc::new(Communicator::connect(&self.control, device, self.ctas, &limit, &|bytes| {
                self.gather_on_node(bytes, &limit)
            })?);
        let mut place = unpoisoned(self.communicator.write());
        // Leaving the group closes it before taking the communicator: either this check fails, or
        // the thread that leaves finds the communicator.
        self.check_open()?;
        *place = Some(Arc::clone(&communicator));
        Ok(communicator)
    }

    /// Returns the window on each rank's memory at its `address`. Collective; see
    /// [`window::Domains::rendezvous`].
    pub fn rendezvous(
        &self,
        device: i32,
        address: u64,
        pad_bytes: usize,
        timeout: Option<Duration>,
    ) -> Result<SymmetricWindow> {
        self.check_alive()?;
        let limit = CallTimeout::from(Instant::now(), timeout.unwrap_or_else(|| self.timeout()));
        let gather = |bytes: &[u8]| self.gather_on_node(bytes, &limit);
        let check = || {
            self.check_alive()?;
            let about = "the rendezvous of symmetric memory";
            interrupt::check().map_err(|_| self.control.interrupted(about))
        };
        let meeting = RendezvousContext {
            control: &self.control,
            gather: &gather,
            limit: &limit,
            check: &check,
            linked: &self.linked,
            timeout: self.timeout(),
        };
        self.domains.rendezvous(&meeting, device, address, pad_bytes)
    }

    /// Gathers `bytes` of every rank through the host's memory.
    pub(super) fn gather_on_node(&self, bytes: &[u8], limit: &CallTimeout) -> Result<Vec<Vec<u8>>> {
        self.gather_to_compare(None, bytes, limit)
    }

    /// Gathers as `gather_on_node` does; errors name the `operator` whose calls the caller will
    /// compare.
    pub(super) fn gather_to_compare(
        &self,
        operator: Option<&str>,
        bytes: &[u8],
        limit: &CallTimeout,
    ) -> Result<Vec<Vec<u8>>> {
        let mut all = vec![vec![0u8; bytes.len()]; self.control.size()];
        let outputs = all
            .iter_mut()
            .map(|out| Span { addr: out.as_mut_ptr() as usize, bytes: out.len() })
            .collect();
        let inputs = vec![Span { addr: bytes.as_ptr() as usize, bytes: bytes.len() }].into();
        let call = Call::inner(CallSpec {
            op: Collective::AllGather,
            inputs,
            outputs,
            compares: operator.map(Into::into),
            ..CallSpec::barrier(None)
        });
        let left = limit.remaining().unwrap_or(Duration::from_millis(1));
        if self.internode.is_some() {
            self.queue.run_intra_node(&[call], left)
        } else {
            self.queue.run(&[call], left)
        }?;
        Ok(all)
    }

    /// Enqueues `calls` in order and returns at once, except that the first call waits for the
    /// set-up with the peers.
    pub fn launch(
        &self,
        calls: &[Call<'_>],
        target: CudaTarget,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.check_open()?;
        self.rejections.resume();
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        if let Some(internode) = &self.internode {
            return internode.launch(self, calls, target, timeout);
        }
        let communicator = self.connected(target.device, timeout)?;
        self.recorder.ask(calls.len());
        let CudaTarget { device, stream, background } = target;
        let first = self.recorder.schedule(
            calls,
            timeout,
            background,
            trace::CallTarget::Cuda { device, stream, background },
        );
        let mut next = first;
        // The sequence number of a call that has begun, until its algorithm is known, so that its
        // entry in the flight recorder is changed only once.
        let mut begun = None;
        let outcome = communicator.launch(calls, target, timeout, |stage| match stage {
            CallStage::Begins(sequence) => {
                begun = Some(sequence);
                next += 1;
            }
            CallStage::Served(algorithm) => {
                if let Some(sequence) = begun.take() {
                    self.recorder.start_child(next - 1, sequence, algorithm);
                }
            }
        });
        outcome.inspect_err(|error| {
            if let Some(sequence) = begun {
                self.recorder.start(next - 1, sequence);
            }
            // The last call that was started and all calls after it have failed.
            (first.max(next.saturating_sub(1))..first + calls.len() as u64).for_each(|number| {
                self.recorder.end(number, &Err(error.clone()), number < next, "")
            });
            self.recorder.note_failure(error);
        })
    }

    /// Enqueues sends and receives; returns as `launch` does. On one node they are one launch, with
    /// at most one message per direction of a pair.
    pub fn launch_messages(
        &self,
        transfers: &[DeviceMessage],
        target: CudaTarget,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.check_open()?;
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        match &self.internode {
            Some(internode) => internode.launch_messages(self, transfers, target, timeout),
            None => self.launch_intra_node(transfers, target, timeout),
        }
    }

    /// Frees the GPU memory once the enqueued work has ended. Returns false if the group had no GPU
    /// memory.
    pub(super) fn disconnect(&self, limit: Duration) -> bool {
        let communicator = unpoisoned(self.communicator.write()).take();
        let Some(communicator) = communicator else { return false };
        if !communicator.drain(limit) {
            log::warn!(
                "group \"{}\": its kernels have not ended, and keep their memory until \
                 this process ends",
                self.control.name()
            );
            std::mem::forget(communicator);
        } else {
            // Another thread may still hold the communicator in order to report that the group was
            // destroyed; that thread then frees it.
            give_up(communicator);
        }
        true
    }

    /// Abandons a communicator that belongs to another process, because the driver does not work
    /// here.
    pub(super) fn forget_communicator(&self) {
        // Forgets a reference, so that the communicator is never dropped: a lock in it may have
        // been held when the process was forked.
        std::mem::forget(Arc::clone(&self.communicator));
    }
}

impl IntraNode for Group {
    fn run_call(&self, call: &Call<'_>, timeout: Duration) -> Result<()> {
        self.queue.run(std::slice::from_ref(call), timeout)
    }

    fn gpus(&self, device: i32) -> Result<Arc<Communicator>> {
        self.connected(device, self.timeout())
    }

    fn launch_intra_node(
        &self,
        transfers: &[DeviceMessage],
        target: CudaTarget,
        timeout: Duration,
    ) -> Result<()> {
        self.check_alive()?;
        let CudaTarget { device, stream, background } = target;
        let place = trace::CallTarget::Cuda { device, stream, background };
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for transfer in transfers {
            let peer = transfer.message.peer.filter(|peer| peer.index() < self.control.size());
            let peer = peer.ok_or_else(|| {
                Error::value("a transfer between GPUs needs a rank of the group as its other end")
            })?;
            let messages = if transfer.send { &mut sends } else { &mut receives };
            messages.push((peer, transfer.message.span));
        }
        let communicator = self.connected(target.device, timeout)?;
        let note = |transfer: &DeviceMessage| {
            self.recorder.message(transfer.send, &transfer.message, timeout, place, false)
        };
        let numbers: Vec<u64> = transfers.iter().map(note).collect();
        communicator.transfer(&sends, &receives, target, timeout).inspect_err(|error| {
            numbers
                .iter()
                .for_each(|&number| self.recorder.end(number, &Err(error.clone()), true, ""));
            self.recorder.note_failure(error);
        })
    }
}

/// Frees the GPU memory of `rank`, which has died, on a separate thread, because kernels take a
/// moment to end.
pub(super) fn release_dead(slot: &DeviceSlot, rank: Rank) {
    let Some(communicator) = unpoisoned(slot.read()).clone() else { return };
    let work = move || {
        communicator.release_dead(rank);
        give_up(communicator);
    };
    if let Err(error) = thread::spawn("symm-release", Some(256 << 10), work) {
        log::warn!("the GPU memory of a dead rank stays until the group is destroyed: {error}");
    }
}

/// Frees the communicator if it has no other user; otherwise the last user frees it.
fn give_up(communicator: Arc<Communicator>) {
    if let Some(communicator) = Arc::into_inner(communicator) {
        communicator.release();
    }
}

/// Returns the number of the capture that records the CUDA stream; 0 if none does, or if it is
/// unknown.
pub fn capture_of(stream: usize) -> u64 {
    // The driver counts captures from 1.
    Stream(stream).capture().ok().flatten().unwrap_or(0)
}

/// Returns statistics as a map: how many CUDA calls of this process each algorithm has run, and
/// under `direct`, in how many of them this rank's kernels accessed peers' tensors directly.
pub fn stats() -> serde_json::Value {
    use crate::coll::cuda::stats;
    let mut all = serde_json::json!(stats::served());
    if let Some((all, direct)) =
        all.as_object_mut().zip(Some(stats::direct()).filter(|&direct| direct > 0))
    {
        all.insert("zero_copy".into(), direct.into());
    }
    all
}
