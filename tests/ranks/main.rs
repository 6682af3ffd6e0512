//! Ranks as threads of one process, on memory that they share: collectives, splits, windows, and
//! forged memory.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    clippy::print_stderr
)]

#[path = "../process/mod.rs"]
mod process;
mod threads;

mod allocations;
mod cma;
mod collectives;
mod garbage_memory;
mod hostile_memory;
mod memory_limit;
mod uneven_splits;
mod windows;
