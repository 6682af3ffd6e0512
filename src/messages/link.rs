//! Link: what carries the frames between this rank and one peer.

use super::frame::Frame;
use crate::coll::call::Span;
use crate::error::Result;

/// Link between this rank and one peer. What a link sends arrives in the same order, once.
pub(super) trait Link {
    /// Sends a whole short message, `frame` with the bytes of `span`, if it may go unasked and nothing is in its way. Returns whether it has
    /// left `span`.
    fn send_now(&mut self, frame: Frame, span: Span) -> Result<bool>;

    /// Sends that message as soon as there is room, or offers it if it has to be requested. Returns how many of its bytes follow the offer
    /// unasked; `None` if the link does not exist yet and the message was not sent.
    fn send(&mut self, frame: Frame, span: Span) -> Result<Option<usize>>;

    /// Notes that a message of the peer which came unasked, or `bytes` bytes of it, has found its receive.
    fn matched(&mut self, bytes: usize) -> Result<()>;

    /// Number of bytes that may be requested now, where `rest` bytes of a message are missing.
    fn room(&self, rest: usize) -> usize;

    /// Requests the bytes of a message from those on of which `frame` tells, as many as `room` has said.
    fn request(&mut self, frame: Frame) -> Result<()>;

    /// Notes that requested bytes have arrived, with which the message is complete if `whole`.
    fn arrived(&mut self, whole: bool) -> Result<()>;

    /// Sends the bytes of `span` that the peer has requested, from those on of which `frame` tells. Returns whether the message has left
    /// `span` with them; if not, the link says so later, or the peer requests more.
    fn serve(&mut self, frame: Frame, span: Span) -> Result<bool>;
}
