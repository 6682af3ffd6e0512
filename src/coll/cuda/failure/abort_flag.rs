//! The word that makes kernels end when their group has failed.
#![allow(unsafe_code, reason = "words that lie in shared or page-locked memory")]

use crate::control::ControlBlock;
use crate::error::Result;
use crate::lock::lock;
use crate::mem::layout::HEADER_BYTES;
use crate::mem::pinned::RegisteredMemory;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

/// The abort flag of a group: the first word of its header, registered with the GPUs of this
/// process. It is not 0 once the group has failed. All holders share one registration, because the
/// driver rejects a second one. Each holder must be dropped while a context is current.
pub(crate) struct AbortFlag {
    header: usize,
    device: u64,
}

struct OpenedFlag {
    registered: RegisteredMemory,
    holders: usize,
}

/// The registered headers, by address.
fn opened() -> MutexGuard<'static, HashMap<usize, OpenedFlag>> {
    static OPENED: LazyLock<Mutex<HashMap<usize, OpenedFlag>>> = LazyLock::new(Mutex::default);
    lock(&OPENED)
}

impl AbortFlag {
    /// Returns the flag of the group of `control`, registered in the current context.
    pub(crate) fn of(control: &Arc<ControlBlock>) -> Result<Self> {
        let header = control.segment().ptr(0, HEADER_BYTES);
        let mut opened = opened();
        if let Some(known) = opened.get_mut(&(header as usize)) {
            known.holders += 1;
            return Ok(Self { header: header as usize, device: known.registered.device() });
        }
        let segment = Arc::new(control.segment().hold()?);
        // SAFETY: the header is mapped as long as `segment` lives, and was reserved when the group
        // was created.
        let registered = unsafe { RegisteredMemory::new(header, HEADER_BYTES, segment) }?;
        let stop = Self { header: header as usize, device: registered.device() };
        opened.insert(stop.header, OpenedFlag { registered, holders: 1 });
        Ok(stop)
    }

    /// Returns the device address of the word.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }
}

impl Drop for AbortFlag {
    fn drop(&mut self) {
        // Unregister before the lock is released, so that the next `of` finds the header either
        // counted or unregistered.
        let mut opened = opened();
        let Some(known) = opened.get_mut(&self.header) else { return };
        known.holders -= 1;
        if known.holders == 0 {
            opened.remove(&self.header);
        }
    }
}
