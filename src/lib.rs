//! The core of torch-symm: collectives between the processes of one host, through shared memory.
//!
//! From the outside in:
//! - [`bridge`](../src/bridge.rs) (feature `torch`): what C++ sees
//! - [`group`]: a group of ranks and everything one can ask of it
//! - [`coll`]: collectives
//! - [`kernels`]: loops over tensor bytes
//! - [`store`]: the key-value store through which ranks meet
//! - [`dtype`], [`rank`], [`error`]: leaves that everyone may import

#[cfg(feature = "torch")]
pub mod bridge;
pub mod coll;
pub mod dtype;
pub mod error;
pub mod group;
pub mod kernels;
pub mod rank;
pub mod store;
