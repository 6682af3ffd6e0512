//! The link that carries the frames between this rank and one peer.

use super::frame::Frame;
use crate::coll::call::Span;
use crate::error::Result;

/// The link between this rank and one peer. All that it sends arrives in order, exactly once.
pub(super) trait Link {
    /// Sends an eager message, `frame` with the bytes of `span`, if it is short enough and nothing
    /// is queued before it. Returns true if `span` is no longer needed.
    fn send_now(&mut self, frame: Frame, span: Span) -> Result<bool>;

    /// Sends the message of `frame` and `span` as soon as there is space, or offers it if it is too
    /// long. Returns how many of its bytes follow the offer; `None` if the link does not exist yet
    /// and the message was not sent.
    fn send(&mut self, frame: Frame, span: Span) -> Result<Option<usize>>;

    /// Notes that an unrequested message of the peer, or `bytes` bytes of it, has found its
    /// receive.
    fn matched(&mut self, bytes: usize) -> Result<()>;

    /// Returns how many bytes may be requested now if `rest` bytes of a message are missing.
    fn room(&self, rest: usize) -> usize;

    /// Requests as many bytes of a message as [`room`](Self::room) has returned, from the offset
    /// that `frame` names.
    fn request(&mut self, frame: Frame) -> Result<()>;

    /// Notes that requested bytes have arrived; `whole` is true if the message is complete.
    fn arrived(&mut self, whole: bool) -> Result<()>;

    /// Sends the bytes of `span` that the peer has requested, from the offset that `frame` names.
    /// Returns true if `span` is no longer needed; otherwise the link reports that later, or the
    /// peer requests more.
    fn serve(&mut self, frame: Frame, span: Span) -> Result<bool>;
}
