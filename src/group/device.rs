//! What a group does on GPUs.

use super::Group;
use crate::coll::call::{Call, Op, Span};
pub use crate::coll::cuda::plane::CudaTarget;
use crate::coll::cuda::plane::Plane;
use crate::config::Config;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cuda::driver::{Device, Stream};
use crate::mem::{heap, vmm};
use crate::p2p::Message;
use crate::rank::Rank;
use crate::sync::limit::Limit;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

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
        self.plane.read().unwrap_or_else(PoisonError::into_inner).clone()
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
        plane.launch(calls, target, timeout)
    }

    /// Enqueues sends and receives as one launch, where no two go the same way; returns as `launch` does.
    pub fn launch_transfers(&self, transfers: &[Transfer], target: CudaTarget, timeout: Option<Duration>) -> Result<()> {
        self.check_alive()?;
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for transfer in transfers {
            let peer = transfer.message.peer.filter(|peer| peer.index() < self.board.size());
            let peer = peer.ok_or_else(|| Error::value("a transfer between GPUs needs a rank of the group as its other end"))?;
            let messages = if transfer.send { &mut sends } else { &mut receives };
            messages.push((peer, transfer.message.span));
        }
        self.connected(target.device, timeout)?.transfer(&sends, &receives, target, timeout)
    }

    /// Gives the GPU's memory back once what was enqueued is done. False if there was none.
    pub(super) fn disconnect(&self, limit: Duration) -> bool {
        let plane = self.plane.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(plane) = plane else { return false };
        if !plane.drain(limit) {
            log::warn!("group \"{}\": its kernels have not ended, and keep their memory until this process ends", self.board.name());
            std::mem::forget(plane);
        } else if let Some(plane) = Arc::into_inner(plane) {
            // Else another thread is about to be told that the group was destroyed, and lets go of it then.
            plane.release();
        }
        true
    }

    /// Lets go of a plane that is another process's: the driver does not work here.
    pub(super) fn forget_plane(&mut self) {
        if let Some(plane) = self.plane.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            std::mem::forget(plane);
        }
    }
}

/// Whether the CUDA stream records a graph.
pub fn capturing(stream: usize) -> bool {
    Stream(stream).capture().ok().flatten().is_some()
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

/// Address of a new segment of at least `bytes` of symmetric memory of `device`. An error of kind `Config` where none is left.
pub fn allocate(device: i32, bytes: usize) -> Result<u64> {
    if !Config::get().p2p {
        return Err(Error::config("SYMM_P2P=0 keeps GPUs from mapping each other's memory, so there is none that is symmetric"));
    }
    heap::of(device)?.allocate(bytes)
}

/// Gives back the segment at `address`, which `allocate` returned. Waits for the device's work first, as `cudaFree` does, and then,
/// for at most a second, for the peers to let go of it.
pub fn release(address: u64) -> Result<()> {
    let none = || Error::value(format!("no symmetric memory lies at {address:#x}"));
    heap::at(address).ok_or_else(none)?.release(address)
}

/// Whether `device` can have symmetric memory at all.
pub fn shares(device: i32) -> bool {
    Config::get().p2p && Device::open(device).is_ok_and(|device| vmm::supported(&device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn what_is_no_symmetric_memory_cannot_be_given_back() {
        let error = release(4096).expect_err("nothing lies there");
        assert_eq!(error.kind, Kind::Value);
        assert!(error.message.contains("0x1000"), "{error}");
    }

    #[test]
    fn a_device_that_is_not_there_shares_nothing() {
        assert!(!shares(4711));
        assert_eq!(allocate(4711, 1).expect_err("no such device").kind, allocate(4711, 1).expect_err("nor later").kind);
    }
}
