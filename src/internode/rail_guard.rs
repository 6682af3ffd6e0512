//! A rail that several holders share, and the thread on which it ends.
#![allow(unsafe_code, reason = "a value that another thread drops")]

use super::rail::Rail;
use crate::sys::thread::start_aside;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::mpsc::Sender;

/// A rail, and a sender that is dropped after it. Some backends can only end when their last
/// transfer does, so a new thread drops the rail when its last holder releases it.
pub(super) struct RailGuard(ManuallyDrop<(Rail, Sender<()>)>);

impl RailGuard {
    /// Wraps `rail`; `ended` is dropped once the rail has ended.
    pub(super) fn new(rail: Rail, ended: Sender<()>) -> Self {
        Self(ManuallyDrop::new((rail, ended)))
    }
}

impl Deref for RailGuard {
    type Target = Rail;

    fn deref(&self) -> &Self::Target {
        &self.0.0
    }
}

impl Drop for RailGuard {
    fn drop(&mut self) {
        // SAFETY: not used after `drop`, which runs once.
        let held = unsafe { ManuallyDrop::take(&mut self.0) };
        start_aside("symm-rail-end", move || drop(held));
    }
}
