//! What is under way between this rank and its peers, and what each frame does to it.

use super::{DIRECT_BYTES, Finished, STREAM_BYTES, Sending, State, Stream};
use crate::done::Done;
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, Store};
use crate::p2p::channel::{Channel, Outgoing};
use crate::p2p::frame::{Frame, Kind};
use crate::p2p::matching::{Content, Matching, Posted, Unexpected};
use crate::rank::Rank;
use crate::sync::board::Board;
use crate::sync::limit::Limit;
use std::collections::BTreeMap;

impl State {
    pub(super) fn ticket(&mut self) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.open.insert(ticket);
        ticket
    }

    pub(super) fn stirs(&self, board: &Board) -> bool {
        board.peers().any(|peer| self.channels[peer.index()].stirs(board))
    }

    pub(super) fn limits(&self) -> impl Iterator<Item = &Limit> {
        let receives = self.matching.posted.iter().chain(self.streams.values().map(|stream| &stream.posted));
        receives.map(|posted| &posted.limit).chain(self.sends.values().map(|send| &send.limit))
    }

    fn finish(&mut self, ticket: u64, done: Done, outcome: Result<()>, source: Option<Rank>) {
        self.finished.push(Finished { ticket, done, outcome, source });
    }

    fn finish_send(&mut self, ticket: u64) {
        if let Some(send) = self.sends.remove(&ticket) {
            self.finish(ticket, send.done, Ok(()), None);
        }
    }

    pub(super) fn advance(&mut self, board: &Board, direct: bool) -> Result<bool> {
        let mut moved = false;
        for peer in board.peers() {
            loop {
                let mut incoming = None;
                let took = self.channels[peer.index()].receive(board, |frame, payload| {
                    incoming = Some((frame, place(&mut self.matching, &mut self.streams, peer, frame, payload)));
                    Ok(())
                })?;
                moved |= took;
                let Some((frame, posted)) = incoming else { break };
                self.react(board, direct, peer, frame, posted)?;
            }
            let mut sent = Vec::new();
            moved |= self.channels[peer.index()].flush(board, |ticket| sent.push(ticket))?;
            for ticket in sent {
                self.finish_send(ticket);
            }
        }
        Ok(moved)
    }

    /// What follows from a frame whose payload has been put in its place; `posted` is the receive it belongs to, if that is known.
    fn react(&mut self, board: &Board, direct: bool, peer: Rank, frame: Frame, posted: Option<Posted>) -> Result<()> {
        match (frame.kind, posted) {
            (Kind::Eager, Some(posted)) => {
                let posted = self.check_size(board, peer, frame.bytes, posted)?;
                self.channels[peer.index()].count_match(board);
                self.finish(posted.ticket, posted.done, Ok(()), Some(peer));
            }
            (Kind::Offer, Some(posted)) => {
                let content = Content::Offer { id: frame.id, addr: frame.value };
                let message = Unexpected { from: peer, tag: frame.tag, bytes: frame.bytes, content };
                self.deliver(board, direct, posted, message)?;
            }
            (Kind::Data, Some(posted)) => self.finish(posted.ticket, posted.done, Ok(()), Some(peer)),
            (Kind::Ask, _) => {
                if let Some(send) = self.offered(board, peer, frame)? {
                    send.asked = true;
                    let bytes = send.span.bytes as u64;
                    let head = Frame { kind: Kind::Data, tag: send.tag, id: frame.id, bytes, value: frame.value.min(bytes) };
                    let stream = Outgoing::Stream(head, send.span);
                    self.channels[peer.index()].enqueue(stream);
                }
            }
            (Kind::Taken, _) => {
                if self.offered(board, peer, frame)?.is_some() {
                    self.finish_send(frame.id);
                }
            }
            (Kind::Padding | Kind::Eager | Kind::Offer | Kind::Data, _) => {}
        }
        Ok(())
    }

    /// The send that `peer` answers, unless it has failed meanwhile. It answers only what was offered to it, and once: a second answer
    /// would have memory read that is its sender's again.
    fn offered(&mut self, board: &Board, peer: Rank, frame: Frame) -> Result<Option<&mut Sending>> {
        match self.sends.get_mut(&frame.id) {
            Some(send) if send.peer != peer || send.asked => {
                Err(Error::internal(format!("{} sent a frame that makes no sense: {frame:?}", board.describe(peer))))
            }
            send => Ok(send),
        }
    }

    /// Gives a message that has come or been offered to its receive.
    pub(super) fn deliver(&mut self, board: &Board, direct: bool, posted: Posted, message: Unexpected) -> Result<()> {
        let from = message.from;
        let posted = self.check_size(board, from, message.bytes, posted)?;
        match message.content {
            Content::Eager(bytes) => {
                // SAFETY: sizes are equal (checked above); the span is the receiver's.
                unsafe { cpu::copy(posted.span.ptr(), bytes.as_ptr(), bytes.len(), Store::Cached) }
                self.channels[from.index()].count_match(board);
                self.finish(posted.ticket, posted.done, Ok(()), Some(from));
            }
            Content::Own { ticket } => self.deliver_own(board, posted, ticket)?,
            Content::Offer { id, addr } => {
                // Two ranks that copy into and out of a ring are quicker than one that reads alone, but the sender may be busy elsewhere.
                let (span, mut got) = (posted.span, 0);
                while direct && got < span.bytes && !board.attends(from) {
                    let bytes = DIRECT_BYTES.min(span.bytes - got);
                    // SAFETY: got + bytes <= span.bytes; the span is the receiver's, who leaves it alone until its completion.
                    let read = unsafe { crate::sys::remote::read_memory(board.pid(from), addr as usize + got, span.ptr().add(got), bytes) };
                    if let Err(error) = read {
                        let text = format!("receiving {} bytes from {}: {error}", span.bytes, board.describe(from));
                        return Err(self.refuse(posted, Error::peer(text)));
                    }
                    got += bytes;
                }
                let reply = if got == span.bytes { Kind::Taken } else { Kind::Ask };
                self.channels[from.index()].enqueue(Outgoing::Control(Frame::control(reply, id, got as u64)));
                if reply == Kind::Taken {
                    self.finish(posted.ticket, posted.done, Ok(()), Some(from));
                } else {
                    self.streams.insert((from, id), Stream { posted, got: got as u64 });
                }
            }
        }
        Ok(())
    }

    /// Gives a rank's message to itself.
    pub(super) fn deliver_own(&mut self, board: &Board, posted: Posted, ticket: u64) -> Result<()> {
        let Some(send) = self.sends.get(&ticket) else { return Ok(()) };
        let me = board.rank();
        let span = send.span;
        let posted = self.check_size(board, me, span.bytes as u64, posted)?;
        if span.addr != posted.span.addr {
            // SAFETY: sizes are equal (checked above); both spans are the user's, and a message is not received over itself in part.
            unsafe { cpu::copy(posted.span.ptr(), span.ptr(), span.bytes, Store::Cached) }
        }
        self.finish_send(ticket);
        self.finish(posted.ticket, posted.done, Ok(()), Some(me));
        Ok(())
    }

    /// Returns the receive if the message is of its size; else the receive is complete, with the error.
    fn check_size(&mut self, board: &Board, from: Rank, bytes: u64, posted: Posted) -> Result<Posted> {
        if bytes == posted.span.bytes as u64 {
            return Ok(posted);
        }
        let (from, me, expected) = (board.describe(from), board.describe(board.rank()), posted.span.bytes);
        let text = format!("{from} sent {bytes} bytes (tag {}) to {me}, whose recv expects {expected}", posted.tag);
        Err(self.refuse(posted, Error::mismatch(text)))
    }

    fn refuse(&mut self, posted: Posted, error: Error) -> Error {
        self.finish(posted.ticket, posted.done, Err(error.clone()), None);
        error
    }

    /// Why some open transfer can never complete, if so.
    pub(super) fn hopeless(&self, board: &Board, lost: &[(Rank, String)]) -> Option<Error> {
        let me = board.describe(board.rank());
        let find = |peer: Rank| lost.iter().find(|(rank, _)| *rank == peer);
        let receives = self.matching.posted.iter().chain(self.streams.values().map(|stream| &stream.posted));
        for Posted { peer, tag, span, limit, .. } in receives {
            let gone = match peer {
                Some(peer) => find(*peer),
                None => lost.first().filter(|_| lost.len() + 1 == board.size()),
            };
            let what = || format!("recv({} bytes, tag {tag}) of group \"{}\"", span.bytes, board.name());
            if let Some((peer, how)) = gone {
                let (peer, seconds) = (board.describe(*peer), limit.waited().as_secs_f32());
                return Some(Error::peer(format!("{peer} {how}; {me} had waited {seconds:.1} s for it in {}", what())));
            }
            if limit.left().is_none() {
                let from = peer.map_or_else(|| "any rank".into(), |peer| state_of(board, peer));
                return Some(Error::timeout(format!(
                    "{me} waited {:.1} s until its timeout in {} for {from}",
                    limit.waited().as_secs_f32(),
                    what()
                )));
            }
        }
        for Sending { peer, tag, span, limit, .. } in self.sends.values() {
            let what = || format!("send({} bytes, tag {tag}) of group \"{}\"", span.bytes, board.name());
            if let Some((peer, how)) = find(*peer) {
                let (peer, seconds) = (board.describe(*peer), limit.waited().as_secs_f32());
                return Some(Error::peer(format!("{peer} {how}; {me} had waited {seconds:.1} s for it in {}", what())));
            }
            if limit.left().is_none() {
                let to = state_of(board, *peer);
                return Some(Error::timeout(format!(
                    "{me} waited {:.1} s until its timeout in {} for {to}",
                    limit.waited().as_secs_f32(),
                    what()
                )));
            }
        }
        None
    }

    pub(super) fn fail_all(&mut self, error: &Error) {
        let posted = std::mem::take(&mut self.matching.posted);
        let streams = std::mem::take(&mut self.streams);
        for posted in posted.into_iter().chain(streams.into_values().map(|stream| stream.posted)) {
            self.finish(posted.ticket, posted.done, Err(error.clone()), None);
        }
        for (ticket, send) in std::mem::take(&mut self.sends) {
            self.finish(ticket, send.done, Err(error.clone()), None);
        }
        self.channels.iter_mut().for_each(Channel::let_go);
    }
}

/// Puts a frame's payload where it belongs; returns the receive that it completes or, for an offer, that waits for it.
fn place(matching: &mut Matching, streams: &mut BTreeMap<(Rank, u64), Stream>, from: Rank, frame: Frame, payload: &[u8]) -> Option<Posted> {
    match frame.kind {
        Kind::Eager | Kind::Offer => {
            let posted = matching.take_receive(from, frame.tag);
            match &posted {
                Some(posted) if posted.span.bytes == payload.len() => {
                    // SAFETY: as many bytes as the receiver's span holds, which is left alone until its completion.
                    unsafe { cpu::copy(posted.span.ptr(), payload.as_ptr(), payload.len(), Store::Cached) }
                }
                // An offer has no payload; a message of another size is reported by `check_size`.
                Some(_) => {}
                None => {
                    let content = match frame.kind {
                        Kind::Eager => Content::Eager(payload.into()),
                        Kind::Offer | Kind::Padding | Kind::Ask | Kind::Data | Kind::Taken => {
                            Content::Offer { id: frame.id, addr: frame.value }
                        }
                    };
                    matching.unexpected.push_back(Unexpected { from, tag: frame.tag, bytes: frame.bytes, content });
                }
            }
            posted
        }
        Kind::Data => {
            let stream = streams.get_mut(&(from, frame.id))?;
            let end = frame.value as usize + payload.len();
            if end > stream.posted.span.bytes {
                return None;
            }
            let store = if stream.posted.span.bytes >= STREAM_BYTES { Store::Streaming } else { Store::Cached };
            // SAFETY: the piece lies within the receiver's span (checked above), which is left alone until its completion.
            unsafe { cpu::copy(stream.posted.span.ptr().add(frame.value as usize), payload.as_ptr(), payload.len(), store) }
            stream.got += payload.len() as u64;
            if stream.got < stream.posted.span.bytes as u64 {
                return None;
            }
            streams.remove(&(from, frame.id)).map(|stream| stream.posted)
        }
        Kind::Padding | Kind::Ask | Kind::Taken => None,
    }
}

fn state_of(board: &Board, peer: Rank) -> String {
    let state = crate::sys::process::state(board.pid(peer)).unwrap_or("exited");
    format!("{} ({state})", board.describe(peer))
}
