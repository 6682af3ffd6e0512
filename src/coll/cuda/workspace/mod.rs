//! The device memory of a communicator: its layout ([`layout`]), how ranks share it ([`memory`]),
//! and how much of it all groups of a process may use together ([`budget`]).

pub mod budget;
pub mod layout;
pub mod memory;
