//! The core of torch-symm: collectives and messages between processes, on one node or several.
//!
//! From the outside in, each room above those that it uses (`tests/layers.rs` looks after it):
//! - `bridge` (feature `bridge`): what C++ sees
//! - [`group`][]: a group of ranks and everything one can ask of it
//! - [`call_queue`][]: the queue of a group's collectives on the host, and who runs them
//! - [`internode`][]: what a group has only if it is on several nodes, with backends of torch between them; [`messages`][]: send and receive
//! - [`health`][]: the first failure of a group, and how all its parts hear of it
//! - [`window`][]: symmetric memory that programs use themselves, and its signals; [`fused`][]: matrix products fused with
//!   collectives; [`trace`][]: the last calls, for when something fails
//! - [`coll`][]: collectives: what was asked, what will run, how long it takes, on the host and on GPUs
//! - [`symm_mem`][]: every rank's heap, mapped by all its peers; [`bootstrap`][]: how ranks find each other and come to share memory;
//!   [`exit_watch`][]: noticing that one has died
//! - [`control`][]: a group's control block: who is there, who waits, what failed
//! - [`sync`][]: flags, rings, limits, the first failure; [`transport`][]: backends of torch between nodes
//! - [`mem`][]: memory that all members see; [`kernels`][]: loops over tensor bytes, on the host and on GPUs; [`topo`][]: how devices are
//!   connected; [`store`][]: the key-value store through which ranks meet; [`node_map`][]: which ranks are on which host
//! - [`sys`][]: thin wrappers over the system; [`config`][]: what the environment says
//! - [`completion`][]: where outcomes go
//! - [`dtype`], [`op`], [`rms_norm`], [`rank`], [`lock`], [`error`][]: leaves that everyone may import

// Modules that need it allow it, each with its reason.
#![deny(unsafe_code)]

pub mod bootstrap;
#[cfg(feature = "bridge")]
pub mod bridge;
pub mod call_queue;
pub mod coll;
pub mod completion;
pub mod config;
pub mod control;
pub mod dtype;
pub mod error;
pub mod fused;
pub mod group;
pub mod health;
pub mod internode;
pub mod kernels;
pub mod lock;
pub mod mem;
pub mod messages;
pub mod node_map;
pub mod op;
pub mod rms_norm;

pub mod exit_watch;
pub mod rank;
pub mod store;
pub mod symm_mem;
pub mod sync;
pub mod sys;
pub mod topo;
pub mod trace;
pub mod transport;
pub mod window;
