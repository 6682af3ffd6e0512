//! One send or receive in plain values, and the promise about its memory.
#![allow(unsafe_code, reason = "the constructor by which callers promise memory")]

use crate::coll::call::Span;
use crate::dtype::DType;
use crate::rank::Rank;
use std::ops::Deref;
use std::time::Duration;

/// The arguments of a send or receive on one rank. Code that only records or describes a message
/// accesses no memory, so it takes this type.
#[derive(Clone, Copy, Debug)]
pub struct MessageSpec {
    /// The other rank; `None` receives from any.
    pub peer: Option<Rank>,
    /// The tag, which must be the same on both sides.
    pub tag: i32,
    /// Element type, for messages about a mismatch.
    pub dtype: DType,
    /// Memory that is sent or filled.
    pub span: Span,
    /// Limit of the call; `None`: the group's timeout.
    pub timeout: Option<Duration>,
}

/// A send or receive, whose memory the caller has promised: a send of it may read the span, and a
/// receive may write it.
///
/// ```
/// use symm::coll::call::Span;
/// use symm::dtype::DType;
/// use symm::coll::message::{Message, MessageSpec};
/// use symm::rank::Rank;
///
/// let mut data = [1i32, 2, 3];
/// let span = Span { addr: data.as_mut_ptr().addr(), bytes: size_of_val(&data) };
/// let spec = MessageSpec { peer: Some(Rank(1)), tag: 7, dtype: DType::I32, span, timeout: None };
/// // SAFETY: `data` outlives the message, and no other thread uses it meanwhile.
/// let message = unsafe { Message::new(spec) };
/// assert_eq!(message.span.bytes, 12);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Message(MessageSpec);

impl Message {
    /// Makes a message from these arguments.
    ///
    /// # Safety
    /// The caller promises that, as long as the message or a copy of it exists and until each send
    /// and receive of it has ended, a send may read the span, a receive may write it, and no other
    /// code writes it. A send or receive ends when its completion is called, or when the stream has
    /// passed it.
    pub const unsafe fn new(spec: MessageSpec) -> Self {
        Self(spec)
    }

    /// Returns the same message to or from rank `peer`, for example to pass it to another group, in
    /// which the peer has a different rank.
    pub(crate) const fn with_peer(self, peer: Option<Rank>) -> Self {
        Self(MessageSpec { peer, ..self.0 })
    }

    /// Makes a message in a test, which keeps the promise.
    #[cfg(test)]
    pub(crate) const fn of(spec: MessageSpec) -> Self {
        Self(spec)
    }
}

impl Deref for Message {
    type Target = MessageSpec;

    fn deref(&self) -> &MessageSpec {
        &self.0
    }
}

/// A send or a receive in the memory of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMessage {
    /// True for a send, false for a receive.
    pub send: bool,
    /// The message. Its tag is ignored: messages between two ranks arrive in the order in which
    /// they were sent.
    pub message: Message,
}
