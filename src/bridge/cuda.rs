//! CUDA calls for C++: which ones are enqueued, and on which streams.

use super::ffi::{CallSpec, MessageSpec, Status};
use super::group::{GroupHandle, message, with_calls, with_specs};
use super::{guarded, milliseconds};
use crate::config::Config;
use crate::error::Result;
use crate::group::device::{self, CudaTarget};
use crate::internode::traffic;

impl GroupHandle {
    pub(super) fn launch(
        &self,
        calls: &[CallSpec],
        device: i32,
        stream: usize,
        background: bool,
        timeout_ms: i64,
    ) -> Status {
        let target = CudaTarget { device, stream, background };
        guarded(|| {
            let timeout = milliseconds(timeout_ms);
            with_specs(calls, |specs| {
                self.with(|group| {
                    with_calls(specs, group.place(), |calls| group.launch(calls, target, timeout))
                })
            })
        })
    }

    pub(super) fn launch_transfers(
        &self,
        transfers: &[MessageSpec],
        device: i32,
        stream: usize,
        background: bool,
        timeout_ms: i64,
    ) -> Status {
        let target = CudaTarget { device, stream, background };
        let translate = |transfer: &MessageSpec| {
            Ok(device::DeviceMessage { send: transfer.send, message: message(transfer)? })
        };
        guarded(|| {
            let (transfers, timeout) = (
                transfers.iter().map(translate).collect::<Result<Vec<_>>>()?,
                milliseconds(timeout_ms),
            );
            self.with(|group| group.launch_messages(&transfers, target, timeout))
        })
    }

    pub(super) fn connect(&self, device: i32) -> Status {
        guarded(|| self.with(|group| group.connect(device)))
    }
}

pub(super) fn capture_of(stream: usize) -> u64 {
    let mut answer = 0;
    guarded(|| {
        answer = device::capture_of(stream);
        Ok(())
    });
    answer
}

pub(super) fn blocking_wait() -> bool {
    Config::get().blocking_wait
}

pub(super) fn stats_seconds() -> u64 {
    Config::get().stats_seconds
}

pub(super) fn stats() -> String {
    let mut answer = String::new();
    guarded(|| {
        let mut all = device::stats();
        let between = traffic::counted();
        if let Some(all) = all.as_object_mut().filter(|_| !between.is_empty()) {
            all.insert("inter_node".into(), serde_json::json!(between));
        }
        answer = all.to_string();
        Ok(())
    });
    answer
}
