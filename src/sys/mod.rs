//! The smallest safe wrappers over what the system offers.

pub mod fork;
pub mod host;
pub mod pidfd;
pub mod process;
