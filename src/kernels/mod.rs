//! Loops over tensor bytes.

pub mod cpu;
