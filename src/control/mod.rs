//! A group's control block: the members ([`block`]), how they wait for each other ([`wait`]) and for how long they spin
//! ([`patience`]), and failures ([`status`]).

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
