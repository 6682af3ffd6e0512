//! What ranks of other hosts say: the thread of each wire, and how a group hears that one was lost.

use super::ending::{is_broken, lost_link};
use super::far::Far;
use super::frame::{Frame, Kind, WIRE};
use super::links::{Traffic, arrived};
use super::meet::Said;
use super::wire::{Counters, HEAD, LONGEST, Phase, Refusal, Wire, decode, traffic};
use super::{Messages, State};
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::time::Duration;

impl State {
    /// Does what a frame of a rank of another host asks for; `payload` has come with it.
    pub(super) fn take_in(&mut self, messages: &Messages, peer: Rank, (frame, counters): (Frame, Counters), payload: &[u8]) -> Result<()> {
        let control = &messages.control;
        let Some(wire) = self.wire(peer) else { return Ok(()) };
        if !wire.read(counters) {
            return Err(self.nonsense(control, peer, frame));
        }
        match frame.kind {
            Kind::Bye => return wire.say(Frame::bare(Kind::Credit), &[]),
            Kind::Refused => wire.refused = Some(Refusal::of(frame, payload)),
            Kind::Waits => messages.check_refused(wire, frame)?,
            Kind::Credit => {}
            Kind::Padding | Kind::Taken | Kind::Eager | Kind::Offer | Kind::Request | Kind::Data | Kind::Start => {
                if matches!(frame.kind, Kind::Eager | Kind::Offer | Kind::Request) {
                    wire.refused = None;
                }
                self.hear(control, peer, frame, payload)?;
            }
        }
        self.wire(peer).map_or(Ok(()), Wire::give_credit)
    }
}

impl Messages {
    /// Meets `peer`, and does what it asks for until the connection ends.
    pub(super) fn attend_to(&self, far: &Far, peer: Rank) {
        let address = far.address(peer);
        if let Err(error) = self.meet(far, peer).and_then(|met| if met { self.listen(far, peer, address) } else { Ok(()) }) {
            self.lose(peer, error);
        }
    }

    /// Reads what `peer` says until the connection ends. It needs the `address` of this rank no longer once it has said something.
    fn listen(&self, far: &Far, peer: Rank, address: Said<'_>) -> Result<()> {
        let (links, mut address) = (&*far.links, Some(address));
        while let Some(bytes) = arrived(links, peer, Traffic::Frame, LONGEST)? {
            links.listen(peer, Traffic::Frame, LONGEST)?;
            let nonsense = || Error::internal(format!("{} sent a frame that makes no sense", far.layout.describe(peer)));
            let (frame, counters) = bytes.first_chunk::<HEAD>().and_then(decode).ok_or_else(nonsense)?;
            drop(address.take());
            let length = frame.payload(&WIRE);
            let heard = match traffic(frame.kind) {
                Traffic::Frame => self.hear(far, peer, (frame, counters), &bytes[HEAD..HEAD + length]),
                Traffic::Piece => {
                    let Some(piece) = arrived(links, peer, Traffic::Piece, WIRE.data)? else { return Ok(()) };
                    let heard = self.hear(far, peer, (frame, counters), &piece[..length]);
                    links.release(peer, Traffic::Piece);
                    heard
                }
            };
            links.release(peer, Traffic::Frame);
            if !heard {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Takes in a frame with which `payload` has come; whether more is to be read.
    pub(super) fn hear(&self, far: &Far, peer: Rank, head: (Frame, Counters), payload: &[u8]) -> bool {
        far.links.came(peer, HEAD + payload.len());
        let mut state = self.lock();
        if state.closed.is_some() {
            return false;
        }
        let taken = state.take_in(self, peer, head, payload);
        let heard = taken.is_ok();
        let lost = self.absorb_far(&mut state, Some(peer), taken);
        let leaving = state.leaving;
        self.settle(state);
        if leaving {
            far.changed.notify_all();
        }
        lost.into_iter().for_each(|(peer, error)| self.lose(peer, error));
        heard
    }

    /// Fails the group because of an error of a message, before the completion of that message is called. A lost connection with the `far` peer
    /// is returned instead, for `lose`, because its cause may still arrive.
    pub(super) fn absorb_far(&self, state: &mut State, far: Option<Rank>, moved: Result<()>) -> Option<(Rank, Error)> {
        match (far, moved) {
            (Some(peer), Err(error)) if is_broken(&error) => Some((peer, error)),
            (_, moved) => {
                self.absorb(state, moved.map(|()| true));
                None
            }
        }
    }

    /// The connection to `peer` has ended because of `error`, or is to. That fails the group if a message needs it, now or later.
    pub(super) fn lose(&self, peer: Rank, error: Error) {
        let Some(far) = self.far.get() else { return };
        let mut state = self.lock();
        if state.closed.is_some() {
            return;
        }
        let broken = is_broken(&error);
        let urgent = state.urgent(&self.control, peer);
        let cause = lost_link(&self.control, &far.layout.describe(peer), urgent.as_ref(), error);
        let is_urgent = urgent.is_some();
        let Some(wire) = state.wire(peer) else { return };
        if let Some(first) = wire.lost() {
            drop(state);
            self.health.fail(first);
            return;
        }
        wire.phase = Phase::Lost(cause.clone());
        drop(state);
        far.changed.notify_all();
        // A mismatch has ended its own message already.
        if is_urgent || !broken {
            let told = if broken { self.health.cause(far.layout.local(peer), Duration::MAX) } else { None };
            self.health.fail(told.unwrap_or(cause));
        }
    }
}
