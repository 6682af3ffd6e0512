//! How members of a group wait for each other: never without a deadline, never past a failure.

pub mod atomic;
pub mod board;
pub mod doorbell;
pub mod epitaph;
pub mod failure;
pub mod flag;
pub mod limit;
pub mod pad;
pub mod ring;
pub mod site;
