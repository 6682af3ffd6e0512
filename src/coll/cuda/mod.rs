//! Collectives on tensors in GPU memory.
//!
//! From a call to a kernel: [`plan`] chooses the kernel, [`launch`] fills in its [`arguments`], and [`communicator`]
//! compares the call with the peers' ([`agreement`]) and enqueues it. All state that changes from call to call is in
//! device memory ([`workspace`]), and the kernels themselves count it, so that a captured graph can be replayed.
//! [`failure`] carries a group's failure into kernels and a kernel's failure out of them.

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
