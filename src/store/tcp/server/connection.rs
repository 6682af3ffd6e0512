//! The connection of one client; reads and writes without blocking.

use crate::store::tcp::address::peer_name;
use crate::store::tcp::frame::LENGTH;
use crate::store::tcp::limits::MAX_FRAME;
use crate::store::tcp::proof::{self, HELLO, Nonce};
use crate::sys::eintr::retry;
use bytes::{Buf, Bytes};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::collections::VecDeque;
use std::time::Instant;

/// Frames up to this length never wait for memory.
pub(super) const SHORT: usize = 16 * 1024;

/// Size of a read before the length of a frame is known.
const FIRST: usize = 2 * 1024;

/// Maximum number of bytes that a connection reads or writes in one turn.
const TURN: usize = 256 * 1024;

/// The phase of a client's connection.
#[derive(Debug)]
pub(super) enum ClientPhase {
    /// The client has not authenticated.
    Unidentified(Nonce),
    /// The next frame is expected, or arriving.
    Open,
    /// The client waits for `key`, and gets an answer that names the key at the deadline.
    Waiting { key: String },
    /// The server sends an error and then closes the connection.
    Leaving,
}

/// The result of reading.
#[derive(Debug)]
pub(super) enum Input {
    /// Nothing is complete, and no more bytes are available.
    Nothing,
    /// Nothing is complete, but there is more to read.
    More,
    /// The other end is closed, or has sent malformed data.
    Closed,
    /// The hello of an unidentified peer.
    Hello(Box<[u8; HELLO]>),
    /// A frame of this length is about to arrive, and memory for it must be reserved first.
    Long(usize),
    /// A frame is longer than allowed.
    TooLong(usize),
    /// The body of a frame.
    Frame(Bytes),
}

/// The result of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// Everything was sent.
    Sent,
    /// The other end must read first; an event will announce that it has.
    Blocked,
    /// More remains to be sent after other connections have had their turn.
    More,
    /// The other end is closed.
    Closed,
}

pub(super) struct ClientConnection {
    pub(super) socket: OwnedFd,
    pub(super) phase: ClientPhase,
    /// The request that waits or is to be retried.
    pub(super) request: Option<Bytes>,
    /// The deadline of the current phase; also in the server's deadline queue.
    pub(super) deadline: Option<Instant>,
    /// Size of the memory that this connection has reserved.
    pub(super) reserved: usize,
    /// Size of the pending request as the server's `waiting_bytes` counts it: 0 for a short one.
    pub(super) parked: usize,
    /// True if the other end sends no more.
    pub(super) ended: bool,
    /// True if the last read emptied the socket; an event announces later bytes.
    pub(super) drained: bool,
    input: Vec<u8>,
    output: VecDeque<Bytes>,
}

impl ClientConnection {
    pub(super) fn new(socket: OwnedFd, nonce: Nonce) -> Self {
        let phase = ClientPhase::Unidentified(nonce);
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

    /// Returns a readable name of the peer.
    pub(super) fn peer(&self) -> String {
        peer_name(&self.socket)
    }

    /// Returns true if a frame has started and not ended.
    pub(super) fn midway(&self) -> bool {
        !self.input.is_empty()
    }

    /// Returns true if there may be work that no event announces.
    pub(super) fn pending(&self) -> bool {
        self.midway() || !self.drained || self.ended || matches!(self.phase, ClientPhase::Leaving)
    }

    /// Returns true if part of an answer is still unsent.
    pub(super) fn unsent(&self) -> bool {
        !self.output.is_empty()
    }

    /// Returns the length of the current frame, once the length field has arrived.
    fn announced(&self) -> Option<usize> {
        let length = self.input.get(..LENGTH)?;
        Some(u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize)
    }

    /// Reads available bytes, and returns at most one frame.
    pub(super) fn read(&mut self) -> Input {
        if let Some(found) = self.complete() {
            return found;
        }
        let have = self.input.len();
        // Bytes beyond the hello of an unidentified peer, or beyond a frame whose length is known,
        // stay in the socket.
        let room = match (&self.phase, self.announced()) {
            (ClientPhase::Unidentified(_), _) => HELLO - have,
            (_, Some(length)) => (LENGTH + length - have).min(TURN),
            (_, None) => FIRST,
        };
        self.input.resize(have + room, 0);
        let outcome = retry(|| recv(&self.socket, &mut self.input[have..], RecvFlags::DONTWAIT))
            .map(|(count, _)| count);
        self.input.truncate(have + outcome.unwrap_or(0));
        self.drained = outcome.map_or(true, |count| count < room);
        match outcome {
            Ok(0) => Input::Closed,
            Ok(count) => {
                self.complete().unwrap_or(if count == room { Input::More } else { Input::Nothing })
            }
            Err(Errno::AGAIN) => Input::Nothing,
            Err(_) => Input::Closed,
        }
    }

    /// Returns the input that is already complete in the buffer.
    fn complete(&mut self) -> Option<Input> {
        if matches!(self.phase, ClientPhase::Unidentified(_)) {
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

    /// Queues `pieces` for sending.
    pub(super) fn queue(&mut self, pieces: impl IntoIterator<Item = Bytes>) {
        self.output.extend(pieces);
    }

    /// Sends queued pieces, at most [`TURN`] bytes.
    pub(super) fn write(&mut self) -> Output {
        let mut budget = TURN;
        while let Some(piece) = self.output.front_mut() {
            if budget == 0 {
                return Output::More;
            }
            match send(
                &self.socket,
                &piece[..piece.len().min(budget)],
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                Ok(count) => {
                    budget -= count;
                    // `advance` panics past the end; `count` is at most the length.
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
