//! The word that tells kernels that their group has failed.
#![allow(unsafe_code, reason = "words that lie in shared or page-locked memory")]

use crate::control::ControlBlock;
use crate::error::Result;
use crate::lock::lock;
use crate::mem::layout::HEADER_BYTES;
use crate::mem::pinned::Registered;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

/// A group's header, opened to the GPUs of this process: once, since the driver refuses it a second time. Its first word is not 0 once
/// the group has failed. Dropped in a context.
pub(crate) struct Stop {
    header: usize,
    device: u64,
}

struct Opened {
    registered: Registered,
    holders: usize,
}

/// Flags that are open, by the address of the header.
fn opened() -> MutexGuard<'static, HashMap<usize, Opened>> {
    static OPENED: LazyLock<Mutex<HashMap<usize, Opened>>> = LazyLock::new(Mutex::default);
    lock(&OPENED)
}

impl Stop {
    /// Flag of the group of `control`, opened in the current context.
    pub(crate) fn of(control: &Arc<ControlBlock>) -> Result<Self> {
        let header = control.segment().ptr(0, HEADER_BYTES);
        let mut opened = opened();
        if let Some(known) = opened.get_mut(&(header as usize)) {
            known.holders += 1;
            return Ok(Self { header: header as usize, device: known.registered.device() });
        }
        let segment = Arc::new(control.segment().hold()?);
        // SAFETY: the header is mapped as long as `segment` lives, and was reserved when the group was made.
        let registered = unsafe { Registered::new(header, HEADER_BYTES, segment) }?;
        let stop = Self { header: header as usize, device: registered.device() };
        opened.insert(stop.header, Opened { registered, holders: 1 });
        Ok(stop)
    }

    /// Address at which GPUs find the word.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        // Closed before the lock is let go: whoever opens it next finds it either counted or closed.
        let mut opened = opened();
        let Some(known) = opened.get_mut(&self.header) else { return };
        known.holders -= 1;
        if known.holders == 0 {
            opened.remove(&self.header);
        }
    }
}
