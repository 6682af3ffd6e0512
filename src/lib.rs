//! The core of torch-symm: collectives between the processes of one host, through shared memory.
//!
//! From the outside in:
//! - [`bridge`](../src/bridge.rs) (feature `torch`): what C++ sees
//! - [`group`]: a group of ranks and everything one can ask of it
//! - [`coll`]: the collectives
//! - [`kernels`]: loops over tensor bytes
//! - [`boot`]: joining a group
//! - [`watch`]: noticing that a member's process has ended
//! - [`store`]: the key-value store through which ranks meet
//! - [`sys`]: the smallest wrappers over the kernel
//! - [`config`], [`dtype`], [`rank`], [`error`]: leaves that everyone may import

pub mod boot;
#[cfg(feature = "torch")]
pub mod bridge;
pub mod coll;
pub mod config;
pub mod dtype;
pub mod error;
pub mod group;
pub mod kernels;
pub mod rank;
pub mod store;
pub mod sys;
pub mod watch;
