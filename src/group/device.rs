//! What a group does on GPUs.

use super::Group;
use crate::coll::call::{Call, Op, Span};
pub use crate::coll::cuda::communicator::CudaTarget;
use crate::coll::cuda::communicator::Plane;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::Stream;
use crate::p2p::Message;
use crate::rank::Rank;
use crate::sync::limit::Limit;
use crate::sys::thread;
use crate::trace;
use crate::window::{Meeting, SymmetricWindow};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Where a group keeps its plane.
pub(super) type Slot = RwLock<Option<Arc<Plane>>>;

/// A send or a receive in the memory of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// A send; else a receive.
    pub send: bool,
    /// Its peer, tensor and so on. The tag means nothing: messages between two ranks arrive in their order.
    pub message: Message,
}

impl Group {
    /// The group's GPUs, if they are set up. None in a forked child, where the driver's memory is not mapped.
    pub(super) fn plane(&self) -> Option<Arc<Plane>> {
        self.check_process().ok()?;
        in_use(&self.plane)
    }

    /// Sets up the group's memory on `device`; collective: blocks until all ranks have called it or launched. Idempotent.
    pub fn connect(&self, device: i32) -> Result<()> {
        self.connected(device, self.timeout()).map(|_| ())
    }

    fn connected(&self, device: i32, timeout: Duration) -> Result<Arc<Plane>> {
        self.check_open()?;
        let plane = match self.plane() {
            Some(plane) => plane,
            None => self.set_up(device, timeout)?,
        };
        if plane.device() != device {
            let (name, first) = (self.board.name(), plane.device());
            return Err(Error::value(format!(
                "group \"{name}\" works on cuda:{first}, this tensor is on cuda:{device}; a group has one GPU per rank"
            )));
        }
        Ok(plane)
    }

    #[cold]
    fn set_up(&self, device: i32, timeout: Duration) -> Result<Arc<Plane>> {
        // Not the plane's own lock: who asks for failures or leaves must not wait for peers that never come.
        let _turn = self.setting_up.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plane) = self.plane() {
            return Ok(plane);
        }
        self.check_alive()?;
        let limit = Limit::from(Instant::now(), timeout);
        let plane = Arc::new(Plane::connect(&self.board, device, &limit, &|bytes| self.gather_on_host(bytes, &limit))?);
        let mut place = self.plane.write().unwrap_or_else(PoisonError::into_inner);
        // `leave` closes the group before it takes the plane: one of the two sees the other.
        self.check_open()?;
        *place = Some(Arc::clone(&plane));
        Ok(plane)
    }

    /// Collective: a window on what every rank has at an `address` of its own; see [`window::Places::rendezvous`].
    pub fn rendezvous(&self, device: i32, address: u64, pad_bytes: usize, timeout: Option<Duration>) -> Result<SymmetricWindow> {
        self.check_alive()?;
        let limit = Limit::from(Instant::now(), timeout.unwrap_or_else(|| self.timeout()));
        let gather = |bytes: &[u8]| self.gather_on_host(bytes, &limit);
        let meeting = Meeting { board: &self.board, gather: &gather, limit: &limit, timeout: self.timeout() };
        self.places.rendezvous(&meeting, device, address, pad_bytes)
    }

    /// `bytes` of every rank, through the host's memory.
    pub(super) fn gather_on_host(&self, bytes: &[u8], limit: &Limit) -> Result<Vec<Vec<u8>>> {
        let mut all = vec![vec![0u8; bytes.len()]; self.board.size()];
        let outputs = all.iter_mut().map(|out| Span { addr: out.as_mut_ptr() as usize, bytes: out.len() }).collect();
        let call = Call {
            op: Op::AllGather,
            dtype: DType::U8,
            reduce_op: ReduceOp::Sum,
            root: Rank(0),
            factor: 1.0,
            inputs: vec![Span { addr: bytes.as_ptr() as usize, bytes: bytes.len() }],
            outputs,
            site: None,
        };
        self.engine.run(vec![call], limit.left().unwrap_or(Duration::from_millis(1)))?;
        Ok(all)
    }

    /// Enqueues `calls` in order; returns at once (the first time: after the set-up with the peers).
    pub fn launch(&self, calls: &[Call], target: CudaTarget, timeout: Option<Duration>) -> Result<()> {
        self.check_calls(calls)?;
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let plane = self.connected(target.device, timeout)?;
        self.engine.count(calls.len());
        let CudaTarget { device, stream, background } = target;
        let first = self.recorder.schedule(calls, timeout, background, trace::Place::Cuda { device, stream, background });
        let mut next = first;
        let outcome = plane.launch(calls, target, timeout, |sequence| {
            self.recorder.start(next, sequence);
            next += 1;
        });
        outcome.inspect_err(|error| {
            // The last that was begun, and those behind it.
            (first.max(next.saturating_sub(1))..first + calls.len() as u64)
                .for_each(|number| self.recorder.end(number, &Err(error.clone()), number < next));
            self.recorder.saw(error);
        })
    }

    /// Enqueues sends and receives as one launch, where no two go the same way; returns as `launch` does.
    pub fn launch_transfers(&self, transfers: &[Transfer], target: CudaTarget, timeout: Option<Duration>) -> Result<()> {
        self.check_alive()?;
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let CudaTarget { device, stream, background } = target;
        let place = trace::Place::Cuda { device, stream, background };
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for transfer in transfers {
            let peer = transfer.message.peer.filter(|peer| peer.index() < self.board.size());
            let peer = peer.ok_or_else(|| Error::value("a transfer between GPUs needs a rank of the group as its other end"))?;
            let messages = if transfer.send { &mut sends } else { &mut receives };
            messages.push((peer, transfer.message.span));
        }
        let plane = self.connected(target.device, timeout)?;
        let note = |transfer: &Transfer| self.recorder.message(transfer.send, &transfer.message, timeout, place);
        let numbers: Vec<u64> = transfers.iter().map(note).collect();
        plane.transfer(&sends, &receives, target, timeout).inspect_err(|error| {
            numbers.iter().for_each(|&number| self.recorder.end(number, &Err(error.clone()), true));
            self.recorder.saw(error);
        })
    }

    /// Gives the GPU's memory back once what was enqueued is done. False if there was none.
    pub(super) fn disconnect(&self, limit: Duration) -> bool {
        let plane = self.plane.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(plane) = plane else { return false };
        if !plane.drain(limit) {
            log::warn!("group \"{}\": its kernels have not ended, and keep their memory until this process ends", self.board.name());
            std::mem::forget(plane);
        } else {
            // Another thread may be about to be told that the group was destroyed, and lets go of it then.
            give_up(plane);
        }
        true
    }

    /// Lets go of a plane that is another process's: the driver does not work here.
    pub(super) fn forget_plane(&self) {
        // One owner that never goes: a lock may have been held when the process was forked.
        std::mem::forget(Arc::clone(&self.plane));
    }
}

fn in_use(slot: &Slot) -> Option<Arc<Plane>> {
    slot.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Lets go of the GPU memory of `rank`, which has died, on a thread of its own since kernels take a moment to end.
pub(super) fn bury(slot: &Slot, rank: Rank) {
    let Some(plane) = in_use(slot) else { return };
    let work = move || {
        plane.bury(rank);
        give_up(plane);
    };
    if let Err(error) = thread::spawn("symm-release", Some(256 << 10), work) {
        log::warn!("the GPU memory of a dead rank stays until the group is destroyed: {error}");
    }
}

/// Gives the plane back where nobody else uses it; else whoever is the last does.
fn give_up(plane: Arc<Plane>) {
    if let Some(plane) = Arc::into_inner(plane) {
        plane.release();
    }
}

/// The number of the capture that records what is enqueued in the CUDA stream; 0: none does, or it cannot be told.
pub fn capture_of(stream: usize) -> u64 {
    // The driver counts captures from 1.
    Stream(stream).capture().ok().flatten().unwrap_or(0)
}

/// JSON: which algorithm has served how many CUDA calls of this process, and under `direct` in how many of them this rank's kernels
/// loaded or stored peers' tensors directly.
pub fn stats() -> String {
    use crate::coll::cuda::stats;
    let mut all = serde_json::json!(stats::served());
    if let Some((all, direct)) = all.as_object_mut().zip(Some(stats::direct()).filter(|&direct| direct > 0)) {
        all.insert("direct".into(), direct.into());
    }
    all.to_string()
}
