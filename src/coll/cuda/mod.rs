//! Collectives on tensors in GPU memory.
//!
//! From a call to a kernel: [`plan`] chooses, [`prepare`] fills in what the kernel is told ([`args`]), [`plane`] compares with the peers
//! ([`ledger`]) and enqueues. Everything that changes from call to call lies in device memory ([`layout`]) and is counted by the kernels
//! themselves, so that a captured graph can be replayed.

pub mod args;
mod budget;
mod cube;
pub mod gate;
mod kernels;
pub mod layout;
pub mod ledger;
mod memory;
pub mod plan;
pub mod plane;
pub mod prepare;
mod probed;
pub mod signals;
pub mod stats;
mod stop;
pub mod sum_parts;
