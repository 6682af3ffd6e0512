//! Symmetric memory for programs: allocations, windows, signals.
#![allow(unsafe_code, reason = "addresses and objects that C++ hands over")]

use super::ffi::{self, Status, WindowResult};
use super::{GroupHandle, guarded, milliseconds};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::mem::span::Span;
use crate::symm_mem::HOST;
use crate::window::SymmetricWindow;
use crate::window::allocations;
use crate::window::operators::{self, exchanges::RowExchange};

/// A window, or the error that prevented it.
pub struct WindowHandle(Result<SymmetricWindow>);

impl GroupHandle {
    pub(super) fn rendezvous(
        &self,
        device: i32,
        address: usize,
        pad_bytes: usize,
        timeout_ms: i64,
    ) -> WindowResult {
        let mut window = Err(Error::internal("the window was never opened"));
        let status = guarded(|| {
            let limit = milliseconds(timeout_ms);
            window = self.with(|group| {
                group.single_node("tensors are symmetric")?.rendezvous(
                    device.max(HOST),
                    address as u64,
                    pad_bytes,
                    limit,
                )
            });
            window.as_ref().map(|_| ()).map_err(Clone::clone)
        });
        WindowResult { status, window: Box::new(WindowHandle(window)) }
    }
}

pub(super) fn allocate_window(device: i32, bytes: usize, address: &mut usize) -> Status {
    guarded(|| {
        *address = allocations::allocate(device.max(HOST), bytes)? as usize;
        Ok(())
    })
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

    /// Runs `body` on the window, if it exists. A panic fails its group on all ranks.
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

    pub(super) fn tables(&self) -> [usize; 3] {
        let tables = |window: &SymmetricWindow| {
            [window.buffer_table(), window.pad_table(), window.rank_table()]
        };
        self.window().map_or([0; 3], |window| tables(window).map(|address| address as usize))
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

    pub(super) fn put_signal(
        &self,
        peer: i32,
        channel: i32,
        timeout_ms: i64,
        stream: usize,
    ) -> Status {
        guarded(|| {
            self.with(|window| window.put_signal(peer, channel, milliseconds(timeout_ms), stream))
        })
    }

    pub(super) fn wait_signal(
        &self,
        peer: i32,
        channel: i32,
        timeout_ms: i64,
        stream: usize,
    ) -> Status {
        guarded(|| {
            self.with(|window| window.wait_signal(peer, channel, milliseconds(timeout_ms), stream))
        })
    }

    pub(super) fn one_shot_all_reduce(
        &self,
        dtype: i32,
        input: ffi::Span,
        local: ffi::Span,
        out: ffi::Span,
    ) -> Status {
        let (input, local, out) = (span(input), span(local), span(out));
        guarded(|| {
            let dtype = DType::from_torch(dtype)?;
            // SAFETY: the C++ side passes the data of contiguous tensors; the output does not
            // overlap the input.
            self.with(|window| unsafe {
                window.one_shot_all_reduce(dtype, ReduceOp::Sum, input, local, out)
            })
        })
    }

    pub(super) fn two_shot_all_reduce(
        &self,
        dtype: i32,
        input: ffi::Span,
        out: ffi::Span,
    ) -> Status {
        let (input, out) = (span(input), span(out));
        guarded(|| {
            let dtype = DType::from_torch(dtype)?;
            // SAFETY: the C++ side passes the data of contiguous tensors; the output is the input
            // or does not overlap it.
            self.with(|window| unsafe {
                window.two_shot_all_reduce(dtype, ReduceOp::Sum, input, out)
            })
        })
    }

    pub(super) fn reduce_scatter(
        &self,
        dtype: i32,
        reduce_op: u8,
        input: ffi::Span,
        row: usize,
        out: ffi::Span,
    ) -> Status {
        guarded(|| {
            let (dtype, op) = (DType::from_torch(dtype)?, ReduceOp::from_torch(reduce_op)?);
            // SAFETY: the C++ side passes the data of contiguous tensors that do not overlap.
            self.with(|window| unsafe {
                window.reduce_scatter(dtype, op, span(input), row, span(out))
            })
        })
    }

    pub(super) fn all_gather(&self, dtype: i32, input: ffi::Span, out: ffi::Span) -> Status {
        // SAFETY: the C++ side passes the data of contiguous tensors that do not overlap.
        guarded(|| self.with(|window| unsafe { window.all_gather(dtype, span(input), span(out)) }))
    }

    pub(super) fn all_to_all_vdev(
        &self,
        splits: &WindowHandle,
        dtype: i32,
        spans: [ffi::Span; 4],
        rows: [usize; 3],
    ) -> Status {
        let ([input, splits_input, out, layout], [rows, room, row]) = (spans.map(span), rows);
        let exchange =
            RowExchange { dtype, row, input, rows, splits: splits_input, out, room, layout };
        guarded(|| {
            let splits = splits.window()?;
            // SAFETY: the C++ side passes the data of contiguous tensors; the outputs do not
            // overlap the inputs.
            self.with(|window| unsafe { window.all_to_all_vdev(splits, &exchange) })
        })
    }
}

fn span(span: ffi::Span) -> Span {
    Span { addr: span.addr, bytes: span.bytes }
}

pub(super) fn store_release(address: usize, value: u32) -> Status {
    // SAFETY: the C++ side passes the address of a tensor's element.
    guarded(|| unsafe { operators::publish_word(address, value) })
}
