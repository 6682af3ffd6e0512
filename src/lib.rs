//! The core of torch-symm: collectives and messages between processes, on one node or several.
//!
//! The modules from top to bottom; a module imports only modules below it (`tests/layers.rs` checks
//! this):
//! - `bridge` (feature `bridge`): the functions that C++ calls
//! - [`group`][]: a group of ranks and all its operations
//! - [`call_queue`][]: the order of a group's collectives on CPU tensors, and the threads that run
//!   them
//! - [`internode`][]: the parts of a group that only a group on several nodes has; [`messages`][]:
//!   send and receive
//! - [`health`][]: the first failure of a group, and how it reaches all parts of the group
//! - [`window`][]: symmetric memory of programs, and its signals; [`fused`][]: matmuls fused with
//!   collectives; [`trace`][]: the last calls, which explain a failure
//! - [`coll`][]: collectives on CPU and CUDA tensors: the call, the choice of an algorithm, its
//!   steps, its cost
//! - [`symm_mem`][]: every rank's heap, mapped by all its peers; [`bootstrap`][]: how ranks find
//!   each other and share memory; [`exit_watch`][]: reports when a process has exited
//! - [`control`][]: the group's control block: arrivals, waits and the failure
//! - [`sync`][]: flags, rings, timeouts, the first failure; [`transport`][]: torch's backends
//!   between nodes
//! - [`mem`][]: memory that all ranks of a node share; [`kernels`][]: loops over elements, for CPU
//!   and CUDA; [`topo`][]: how devices are linked; [`store`][]: the key-value stores through which
//!   ranks meet; [`node_map`][]: which ranks are on which node
//! - [`sys`][]: thin wrappers over the system; [`config`][]: the settings, read from the
//!   environment
//! - [`completion`][]: receivers of outcomes; [`cta`], [`dtype`], [`op`], [`rms_norm`], [`rank`],
//!   [`lock`], [`error`][]: types that every module may import

// Modules that need unsafe code allow it, each with its reason.
#![deny(unsafe_code)]

pub mod bootstrap;
#[cfg(feature = "bridge")]
pub mod bridge;
pub mod call_queue;
pub mod coll;
pub mod completion;
pub mod config;
pub mod control;
pub mod cta;
pub mod dtype;
pub mod error;
pub mod exit_watch;
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
pub mod rank;
pub mod rms_norm;
pub mod store;
pub mod symm_mem;
pub mod sync;
pub mod sys;
pub mod topo;
pub mod trace;
pub mod transport;
pub mod window;
