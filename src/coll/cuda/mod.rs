//! Collectives on tensors in GPU memory.
//!
//! From a call to a kernel: [`plan`] chooses the kernel, [`launch`] fills in its [`arguments`], and
//! [`communicator`] compares the call with the peers' calls ([`agreement`]) and enqueues it. All
//! state that changes from call to call is in device memory ([`workspace`]), and the kernels
//! themselves update it, so that a captured graph can be replayed. [`failure`] carries a group's
//! failure into kernels and a kernel's failure out of them.

pub mod agreement;
pub mod all_reduce_norm;
pub mod arguments;
pub mod arrival;
pub mod communicator;
pub mod copy_engine;
mod cube_mesh;
pub mod failure;
pub mod kernel_spec;
pub mod kernels;
pub mod launch;
mod peer_access;
pub mod plan;
pub mod stats;
pub mod tuning;
pub mod workspace;
