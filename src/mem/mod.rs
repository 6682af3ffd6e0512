//! Memory that all members of a group see.

pub mod layout;
pub mod shm;
