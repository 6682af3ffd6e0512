//! Stores: in a file and on a server, with honest, hostile, slow, forked and exited clients.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout)]

#[path = "../process/mod.rs"]
mod process;

mod clients;
mod programs;

mod file;
mod file_processes;
mod tcp;
mod tcp_hostile;
mod tcp_killed;
