//! The core of torch-symm: collectives between the processes of one host, through shared memory.
//!
//! From the outside in:
//! - `bridge` (feature `torch`): what C++ sees
//! - [`group`][]: a group of ranks and everything one can ask of it
//! - [`coll`][]: collectives; [`trace`][]: the last of them, for when something fails
//! - [`sync`][]: waiting, failing, deadlines
//! - [`mem`][]: memory that all members see
//! - [`kernels`][]: loops over tensor bytes; [`topo`][]: how devices are connected
//! - [`boot`][]: how ranks find each other and come to share memory; [`watch`][]: noticing that one has died
//! - [`store`][]: the key-value store through which ranks meet
//! - [`sys`][]: thin wrappers over the system
//! - [`config`][]: what the environment says; [`done`][]: where outcomes go
//! - [`dtype`], [`op`], [`rank`], [`error`][]: leaves that everyone may import

pub mod boot;
#[cfg(feature = "torch")]
pub mod bridge;
pub mod coll;
pub mod config;
pub mod done;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod group;
pub mod kernels;
pub mod mem;
pub mod op;
pub mod p2p;
pub mod rank;
pub mod store;
pub mod sync;
pub mod sys;
pub mod topo;
pub mod trace;
pub mod watch;
