//! A group's control block: the members ([`block`]), how they wait for each other ([`wait`]) and
//! for how long they spin ([`spin_budget`]), and failures ([`status`]).

mod block;
mod call_state;
pub mod spin_budget;
mod status;
mod wait;

pub use block::{ControlBlock, Identity, KernelProgress, ParentGroup};
pub use call_state::{AwaitedMessage, BarrierCount, CallProgress, CurrentCall, RejectionCount};
pub use wait::YIELD_TURNS;

#[cfg(test)]
pub(crate) mod tests;
