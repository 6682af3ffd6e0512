//! A group's control block: who is there ([`block`]), who waits for whom ([`wait`]), what failed ([`status`]).

mod block;
mod call_state;
mod status;
mod wait;

pub use block::{ControlBlock, Identity, Progress};
pub use call_state::{Awaited, Barriers, Doing};
pub use wait::YIELDS;

#[cfg(test)]
pub(crate) mod tests;
