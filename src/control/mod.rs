//! A group's control block: who is there ([`block`]), who waits for whom ([`wait`]) and how patiently ([`patience`]), what failed ([`status`]).

mod block;
mod call_state;
pub mod patience;
mod status;
mod wait;

pub use block::{ControlBlock, Identity, Part, Progress};
pub use call_state::{Awaited, Barriers, Doing, Refusals};
pub use wait::YIELDS;

#[cfg(test)]
pub(crate) mod tests;
