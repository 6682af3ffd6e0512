//! Connection between two ranks of different hosts: bytes in, bytes out, never blocking.

use super::frame::{End, Message, Sealer, Token};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::store::tcp::proof::{self, HELLO, Nonce, OPENING};
use crate::sys::again::retry;
use crate::sys::fork::Unshared;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use std::sync::Arc;
use std::time::Instant;

/// Bytes that are read at once.
const PIECE: usize = 4096;
/// Pieces that are read before others have their turn.
const TURN: usize = 4;
/// Most bytes that wait to be sent.
const UNSENT: usize = 64 * 1024;

/// Phase that a connection has come to.
enum Phase {
    /// A caller that has not shown that it knows the token.
    Unidentified { opening: Box<[u8; OPENING]>, nonce: Nonce },
    /// Both ends know the token; a caller says who it is.
    Identified { sealer: Sealer, peer: Option<Rank> },
}

/// Connection, whose descriptor forked children do not get: they would keep it open when this process has ended.
pub(super) struct Connection {
    phase: Phase,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Time when something last came.
    pub(super) heard: Instant,
    /// Beats since.
    pub(super) missed: u32,
    // In this order: the guard goes before the descriptor is closed.
    _unshared: Option<Unshared>,
    socket: Arc<OwnedFd>,
}

impl Connection {
    fn new(socket: OwnedFd, phase: Phase) -> Self {
        let unshared = Unshared::new(socket.as_fd());
        let (input, output, heard) = (Vec::new(), Vec::new(), Instant::now());
        Self { phase, input, output, heard, missed: 0, _unshared: unshared, socket: Arc::new(socket) }
    }

    /// Of a caller that a hub has accepted: it is sent the first words.
    pub(super) fn accepted(socket: OwnedFd) -> Result<Self> {
        let (opening, nonce) = proof::opening(true)?;
        let mut accepted = Self::new(socket, Phase::Unidentified { opening: Box::new(opening), nonce });
        accepted.output.extend_from_slice(&opening);
        Ok(accepted)
    }

    /// Connection of rank `me` to the hub `peer`, which knows the token, as this rank does.
    pub(super) fn made(socket: OwnedFd, sealer: Sealer, me: Rank, peer: Rank) -> Self {
        let mut made = Self::new(socket, Phase::Identified { sealer, peer: Some(peer) });
        made.queue(&Message::Hello(me));
        made
    }

    /// Descriptor to be polled.
    pub(super) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// True once both ends know that the other has the token, even if a caller has yet to say its rank.
    pub(super) fn identified(&self) -> bool {
        matches!(self.phase, Phase::Identified { .. })
    }

    /// Rank at the other end, if it is known.
    pub(super) fn peer(&self) -> Option<Rank> {
        match self.phase {
            Phase::Unidentified { .. } => None,
            Phase::Identified { peer, .. } => peer,
        }
    }

    /// Notes which rank is at the other end.
    pub(super) fn meet(&mut self, rank: Rank) {
        if let Phase::Identified { peer, .. } = &mut self.phase {
            *peer = Some(rank);
        }
    }

    /// Whether something waits to be sent.
    pub(super) fn unsent(&self) -> bool {
        !self.output.is_empty()
    }

    /// Puts `message` behind what is still to be sent to an identified peer.
    pub(super) fn queue(&mut self, message: &Message) {
        match &mut self.phase {
            Phase::Unidentified { .. } => {}
            Phase::Identified { sealer, .. } => self.output.extend(sealer.seal(message)),
        }
    }

    /// Sends what can be sent now. Where the other end is closed, or reads nothing, the rest is forgotten: reading tells.
    pub(super) fn write(&mut self) {
        while !self.output.is_empty() {
            match retry(|| send(&self.socket, &self.output, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)) {
                Ok(count) => drop(self.output.drain(..count)),
                Err(Errno::AGAIN) if self.output.len() <= UNSENT => return,
                Err(_) => self.output.clear(),
            }
        }
    }

    /// Messages that have come, which `took` gets one by one.
    ///
    /// # Errors
    /// `Network` where the other end is closed or is not who it should be, after what came before.
    pub(super) fn read(&mut self, token: Option<&Token>, mut took: impl FnMut(&mut Self, Message) -> Result<()>) -> Result<()> {
        for _ in 0..TURN {
            let mut piece = [0; PIECE];
            let count = match retry(|| recv(&self.socket, &mut piece, RecvFlags::DONTWAIT)) {
                Ok((0, _)) => return Err(Error::network("closed")),
                Ok((count, _)) => count,
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(Error::network(errno.to_string())),
            };
            self.input.extend_from_slice(&piece[..count]);
            self.admit(token)?;
            while let Phase::Identified { sealer, .. } = &mut self.phase
                && let Some(message) = sealer.open(&mut self.input)?
            {
                (self.heard, self.missed) = (Instant::now(), 0);
                took(self, message)?;
            }
            if count < PIECE {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Admits a caller whose introduction has come, if it is what it must be.
    fn admit(&mut self, token: Option<&Token>) -> Result<()> {
        let Phase::Unidentified { opening, nonce } = &self.phase else { return Ok(()) };
        if !proof::plausible(&self.input) {
            return Err(Error::network("it speaks another protocol"));
        }
        let Some(hello) = self.input.first_chunk::<HELLO>() else { return Ok(()) };
        let token = token.ok_or_else(|| Error::network("nobody is expected"))?;
        let admission = proof::admit(Some(token), nonce, hello).map_err(|_| Error::network("it does not know the group's token"))?;
        let sealer = Sealer::new(token, opening, hello, End::Hub);
        self.input.drain(..HELLO);
        self.output.extend_from_slice(&admission);
        self.phase = Phase::Identified { sealer, peer: None };
        Ok(())
    }

    /// Ends the connection, after what was sent.
    pub(super) fn close(self) {
        // The end of a connection with something unread in it would overtake what was sent.
        let mut piece = [0; PIECE];
        while recv(&self.socket, &mut piece, RecvFlags::DONTWAIT).is_ok_and(|(count, _)| count == PIECE) {}
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}
