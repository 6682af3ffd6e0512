//! A rail for as long as somebody holds it, and the thread on which it ends.
#![allow(unsafe_code, reason = "a value that another thread drops")]

use super::rail::Rail;
use crate::sys::thread::start_aside;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// A rail, and what is dropped after it. A backend may end only when its last transfer does: so that takes a thread of its own, whoever
/// lets go of the rail last.
pub(super) struct Held(ManuallyDrop<(Arc<dyn Rail>, Sender<()>)>);

impl Held {
    /// `ended` is dropped once the rail has ended.
    pub(super) fn new(rail: Arc<dyn Rail>, ended: Sender<()>) -> Self {
        Self(ManuallyDrop::new((rail, ended)))
    }
}

impl Deref for Held {
    type Target = dyn Rail;

    fn deref(&self) -> &Self::Target {
        &*self.0.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: not used after `drop`, which runs once.
        let held = unsafe { ManuallyDrop::take(&mut self.0) };
        start_aside("symm-rail-end", move || drop(held));
    }
}
