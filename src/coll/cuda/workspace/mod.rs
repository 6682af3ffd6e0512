//! The device memory of a communicator: where things lie in it ([`layout`]), how it is shared between ranks ([`memory`]), how much of it
//! all groups of a process may take together ([`budget`]).

pub mod budget;
pub mod layout;
pub mod memory;
