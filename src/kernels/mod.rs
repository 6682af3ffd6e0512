//! Loops over tensor bytes.

pub mod cpu;
pub mod cuda;
