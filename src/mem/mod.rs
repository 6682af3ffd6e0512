//! Memory that ranks share with each other or with GPUs, its layout and its limits.

pub mod device;
pub mod layout;
pub mod memory_limit;
pub mod pinned;
pub mod shm;
pub mod span;
pub mod vmm;
