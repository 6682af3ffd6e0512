//! Link: what carries the frames between this rank and one peer.

use super::frame::Frame;
use crate::coll::call::Span;
use crate::error::Result;

/// Link between this rank and one peer. What a link sends arrives in the same order, once.
pub(super) trait Link {
    /// Sends a whole short message, `frame` with the bytes of `span`, if it may go unasked and nothing is in its way. Returns whether it has
    /// left `span`.
    fn send_now(&mut self, frame: Frame, span: Span) -> Result<bool>;

    /// Sends that message as soon as there is room, or offers it if it has to be asked for. Returns how many of its bytes follow the offer
    /// unasked.
    fn send(&mut self, frame: Frame, span: Span) -> Result<usize>;

    /// Notes that a message of the peer which came unasked, or `bytes` bytes of it, has found its receive.
    fn matched(&mut self, bytes: usize) -> Result<()>;

    /// Asks for the bytes of a message from those on of which `frame` tells.
    fn request(&mut self, frame: Frame) -> Result<()>;

    /// Sends the bytes of `span` that the peer has asked for, from those on of which `frame` tells. Returns whether they have left `span`; if
    /// not, the link says so later.
    fn serve(&mut self, frame: Frame, span: Span) -> Result<bool>;
}
