//! Minimal safe wrappers over kernel features that `rustix` does not offer, or not in this form.

pub mod again;
pub mod core;
pub mod fork;
pub mod host;
pub mod interface;
pub mod interrupt;
pub mod lock;
pub mod logging;
pub mod polled;
pub mod private;
pub mod process;
pub mod random;
pub mod rate_limit;
pub mod remote;
pub mod required;
pub mod socket;
pub mod thread;
pub mod writable;
