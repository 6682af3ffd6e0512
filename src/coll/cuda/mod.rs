//! Collectives on tensors in GPU memory.
//!
//! From a call to a kernel: [`plan`] chooses, [`launch`] fills in what the kernel is told ([`arguments`]), [`communicator`] compares with
//! the peers ([`agreement`]) and enqueues. Everything that changes from call to call lies in device memory ([`workspace`]) and is counted
//! by the kernels themselves, so that a captured graph can be replayed. [`failure`] carries a group's failure into kernels and out of them.

pub mod agreement;
pub mod arguments;
pub mod communicator;
mod cube_mesh;
pub mod failure;
pub mod kernels;
pub mod launch;
pub mod norm;
pub mod plan;
mod probed;
pub mod stats;
mod tuning;
pub mod workspace;
