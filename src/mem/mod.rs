//! Memory that all members of a group see.

pub mod device;
pub mod layout;
pub mod memory_limit;
pub mod pinned;
pub mod shm;
pub mod span;
pub mod vmm;
