//! Symmetric memory that programs use themselves: allocations, windows, signals.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::ffi::{Allocated, OpenedWindow, Status};
use super::{GroupHandle, guarded, milliseconds};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::symm_mem::HOST;
use crate::window::SymmetricWindow;
use crate::window::allocations;

/// A window, or the reason why it never came to be.
pub struct WindowHandle(Result<SymmetricWindow>);

impl GroupHandle {
    pub(super) fn rendezvous(&self, device: i32, address: usize, pad_bytes: usize, timeout_ms: i64) -> OpenedWindow {
        let mut window = Err(Error::internal("the window was never opened"));
        let status = guarded(|| {
            let limit = milliseconds(timeout_ms);
            window = self.with(|group| group.rendezvous(device.max(HOST), address as u64, pad_bytes, limit));
            window.as_ref().map(|_| ()).map_err(Clone::clone)
        });
        OpenedWindow { status, window: Box::new(WindowHandle(window)) }
    }
}

pub(super) fn allocate_window(device: i32, bytes: usize) -> Allocated {
    let mut address = 0;
    let status = guarded(|| {
        address = allocations::allocate(device.max(HOST), bytes)? as usize;
        Ok(())
    });
    Allocated { status, address }
}

pub(super) fn free_window(address: usize) -> Status {
    guarded(|| allocations::free(address as u64))
}

fn addresses(all: &[u64]) -> Vec<usize> {
    all.iter().map(|&address| address as usize).collect()
}

impl WindowHandle {
    fn window(&self) -> Result<&SymmetricWindow> {
        self.0.as_ref().map_err(Clone::clone)
    }

    /// Runs `body` on the window, if there is one. A panic fails its group on all ranks.
    fn with<T>(&self, body: impl FnOnce(&SymmetricWindow) -> Result<T>) -> Result<T> {
        let window = self.window()?;
        window.contain(|| body(window))
    }

    pub(super) fn buffers(&self) -> Vec<usize> {
        self.window().map(|window| addresses(window.buffers())).unwrap_or_default()
    }

    pub(super) fn pads(&self) -> Vec<usize> {
        self.window().map(|window| addresses(window.pads())).unwrap_or_default()
    }

    pub(super) fn buffer_table(&self) -> usize {
        self.window().map_or(0, |window| window.buffer_table() as usize)
    }

    pub(super) fn pad_table(&self) -> usize {
        self.window().map_or(0, |window| window.pad_table() as usize)
    }

    pub(super) fn rank_table(&self) -> usize {
        self.window().map_or(0, |window| window.rank_table() as usize)
    }

    pub(super) fn global_ranks(&self) -> Vec<i32> {
        self.window().map(|window| window.global_ranks().to_vec()).unwrap_or_default()
    }

    pub(super) fn bytes(&self) -> usize {
        self.window().map_or(0, SymmetricWindow::bytes)
    }

    pub(super) fn is_current(&self) -> bool {
        self.window().is_ok_and(SymmetricWindow::is_current)
    }

    pub(super) fn check_process(&self) -> Status {
        guarded(|| self.window()?.check_process())
    }

    pub(super) fn record(&self) {
        if let Ok(window) = self.window() {
            window.record();
        }
    }

    pub(super) fn barrier(&self, channel: i32, timeout_ms: i64, stream: usize) -> Status {
        guarded(|| self.with(|window| window.barrier(channel, milliseconds(timeout_ms), stream)))
    }

    pub(super) fn put_signal(&self, peer: i32, channel: i32, timeout_ms: i64, stream: usize) -> Status {
        guarded(|| self.with(|window| window.put_signal(peer, channel, milliseconds(timeout_ms), stream)))
    }

    pub(super) fn wait_signal(&self, peer: i32, channel: i32, timeout_ms: i64, stream: usize) -> Status {
        guarded(|| self.with(|window| window.wait_signal(peer, channel, milliseconds(timeout_ms), stream)))
    }

    pub(super) fn reduce(&self, dtype: i32, reduce_op: u8, offset: usize, bytes: usize, out: usize) -> Status {
        guarded(|| {
            let (dtype, op) = (DType::from_torch(dtype)?, ReduceOp::from_torch(reduce_op)?);
            // SAFETY: the C++ side passes the data of a tensor of `bytes` bytes, its own part of the window or apart from it, between two
            // barriers of the window.
            self.with(|window| unsafe { window.reduce(dtype, op, offset, bytes, out as *mut u8) })
        })
    }
}
