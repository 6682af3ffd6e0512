//! Send and receive: frames through one ring per ordered pair of ranks, matched by tag.
//!
//! A short message travels in its frame. A long one is offered first; the receiver then reads it straight out of the sender's memory and
//! acknowledges, or, where that is not permitted, asks for it and gets it in frames. Whoever waits for a transfer moves all of them along;
//! a progress thread does while nobody waits.

mod claim;
mod connection;
mod frame;
mod matching;
mod message;
mod transfers;

pub use claim::Claim;
pub use message::Message;
pub use transfers::{TICKET_BIT, Transfers};
