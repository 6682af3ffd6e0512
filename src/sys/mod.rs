//! The smallest safe wrappers over what the system offers.

pub mod process;
