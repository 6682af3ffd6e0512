//! Joining: ranks as threads and as processes, two claims of one rank, an exit at every step, and
//! hostile peers.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr)]

#[path = "../process/mod.rs"]
mod process;
#[path = "../stores/clients.rs"]
mod stores;

mod fault_points;
mod jobs;
mod threads;

mod duplicate_ranks;
mod hostile;
mod interrupts;
mod join;
mod processes;
mod rank_death;
