//! Memory that all members of a group see.

pub mod device;
pub mod heap;
pub mod layout;
pub mod pinned;
pub mod room;
pub mod shm;
pub mod vmm;
