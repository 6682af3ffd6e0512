//! Connection of one client: bytes in, bytes out, never blocking.

use crate::store::tcp::address::peer_name;
use crate::store::tcp::frame::LENGTH;
use crate::store::tcp::limits::MAX_FRAME;
use crate::store::tcp::proof::{self, HELLO, Nonce};
use crate::sys::again::retry;
use bytes::{Buf, Bytes};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::collections::VecDeque;
use std::time::Instant;

/// Frames up to this length never wait for memory.
pub(super) const SHORT: usize = 16 * 1024;

/// Bytes that are read before the length of a frame is known.
const FIRST: usize = 2 * 1024;

/// Bytes that are read or written before others have their turn.
const TURN: usize = 256 * 1024;

/// Phase that a client has come to.
#[derive(Debug)]
pub(super) enum Phase {
    /// Has not introduced itself.
    Unidentified(Nonce),
    /// The next frame is expected, or on its way.
    Open,
    /// Waits for `key`, and is told that it is missing at the deadline.
    Waiting { key: String },
    /// Is to be told why and then left.
    Leaving,
}

/// Result of reading.
#[derive(Debug)]
pub(super) enum Input {
    /// Nothing is complete, and nothing more comes for now.
    Nothing,
    /// Nothing is complete, but there is more to read.
    More,
    /// The other end is closed, or speaks nonsense.
    Closed,
    /// The introduction of an unidentified peer.
    Hello(Box<[u8; HELLO]>),
    /// A frame of this length is about to come: memory for it must be reserved first.
    Long(usize),
    /// A frame is longer than allowed.
    TooLong(usize),
    /// The body of a frame.
    Frame(Bytes),
}

/// Result of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// Everything was sent.
    Sent,
    /// The other end must read first; the socket will say when it has.
    Blocked,
    /// More is to be sent, after others have had their turn.
    More,
    /// The other end is closed.
    Closed,
}

pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) phase: Phase,
    /// The request that waits or is to be tried again.
    pub(super) request: Option<Bytes>,
    /// Time by which something must have happened; kept in the server's calendar as well.
    pub(super) deadline: Option<Instant>,
    /// Bytes that this connection has reserved.
    pub(super) reserved: usize,
    /// Bytes of its request, if that is long and waits.
    pub(super) parked: usize,
    /// Whether the other end sends no more.
    pub(super) ended: bool,
    /// Whether all that had come was read when reading last stopped; what comes later is announced by an event.
    pub(super) drained: bool,
    input: Vec<u8>,
    output: VecDeque<Bytes>,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, nonce: Nonce) -> Self {
        let phase = Phase::Unidentified(nonce);
        Self {
            socket,
            phase,
            request: None,
            deadline: None,
            reserved: 0,
            parked: 0,
            ended: false,
            drained: false,
            input: Vec::new(),
            output: VecDeque::new(),
        }
    }

    /// Name, for people, of the peer at the other end.
    pub(super) fn peer(&self) -> String {
        peer_name(&self.socket)
    }

    /// Whether a frame has begun and not ended.
    pub(super) fn midway(&self) -> bool {
        !self.input.is_empty()
    }

    /// Whether there may be something to do that no event will announce.
    pub(super) fn pending(&self) -> bool {
        self.midway() || !self.drained || self.ended || matches!(self.phase, Phase::Leaving)
    }

    /// Whether an answer is still to be taken.
    pub(super) fn unsent(&self) -> bool {
        !self.output.is_empty()
    }

    /// Length of the frame of which at least the length has come.
    fn announced(&self) -> Option<usize> {
        let length = self.input.get(..LENGTH)?;
        Some(u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize)
    }

    /// Takes what has come, up to one frame.
    pub(super) fn read(&mut self) -> Input {
        if let Some(found) = self.complete() {
            return found;
        }
        let have = self.input.len();
        // An unidentified peer's bytes beyond its introduction are not taken, nor those beyond a frame whose length is known.
        let room = match (&self.phase, self.announced()) {
            (Phase::Unidentified(_), _) => HELLO - have,
            (_, Some(length)) => (LENGTH + length - have).min(TURN),
            (_, None) => FIRST,
        };
        self.input.resize(have + room, 0);
        let outcome = retry(|| recv(&self.socket, &mut self.input[have..], RecvFlags::DONTWAIT)).map(|(count, _)| count);
        self.input.truncate(have + outcome.unwrap_or(0));
        self.drained = outcome.map_or(true, |count| count < room);
        match outcome {
            Ok(0) => Input::Closed,
            Ok(count) => self.complete().unwrap_or(if count == room { Input::More } else { Input::Nothing }),
            Err(Errno::AGAIN) => Input::Nothing,
            Err(_) => Input::Closed,
        }
    }

    /// Input that is complete in the buffer already.
    fn complete(&mut self) -> Option<Input> {
        if matches!(self.phase, Phase::Unidentified(_)) {
            if !proof::plausible(&self.input) {
                return Some(Input::Closed);
            }
            let hello: Box<[u8; HELLO]> = Box::new(self.input.as_slice().try_into().ok()?);
            self.input.clear();
            return Some(Input::Hello(hello));
        }
        let length = self.announced()?;
        if length > MAX_FRAME {
            return Some(Input::TooLong(length));
        }
        if self.input.len() >= LENGTH + length {
            let rest = self.input.split_off(LENGTH + length);
            let frame = std::mem::replace(&mut self.input, rest);
            return Some(Input::Frame(Bytes::from(frame).slice(LENGTH..)));
        }
        (length > SHORT && self.reserved == 0).then_some(Input::Long(length))
    }

    /// Puts `pieces` behind what is still to be sent.
    pub(super) fn queue(&mut self, pieces: impl IntoIterator<Item = Bytes>) {
        self.output.extend(pieces);
    }

    /// Sends what is to be sent.
    pub(super) fn write(&mut self) -> Output {
        let mut budget = TURN;
        while let Some(piece) = self.output.front_mut() {
            if budget == 0 {
                return Output::More;
            }
            match send(&self.socket, &piece[..piece.len().min(budget)], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => {
                    budget -= count;
                    // `advance` panics past the end, and `count` is at most the length.
                    piece.advance(count.min(piece.len()));
                    if piece.is_empty() {
                        self.output.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Output::Blocked,
                Err(Errno::INTR) => return Output::More,
                Err(_) => return Output::Closed,
            }
        }
        Output::Sent
    }
}
