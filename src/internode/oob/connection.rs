//! A connection between two ranks of different nodes; its functions never block.

use super::frame::{ConnectionEnd, OobMessage, Sealer, Token};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::store::tcp::proof::{self, HELLO, Nonce, OPENING};
use crate::sys::eintr::retry;
use crate::sys::fork::CloseInChild;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of bytes per read.
const PIECE: usize = 4096;
/// Maximum number of reads before other connections have their turn.
const TURN: usize = 4;
/// Maximum number of unsent bytes.
const UNSENT: usize = 64 * 1024;

/// The phase of a connection.
enum HandshakePhase {
    /// A caller that has not proved that it knows the token.
    Unidentified { opening: Box<[u8; OPENING]>, nonce: Nonce },
    /// Both ends know the token; `peer` is `None` until a caller has sent its rank.
    Identified { sealer: Sealer, peer: Option<Rank> },
}

/// A connection. Forked children do not inherit its file descriptor; they would keep the connection
/// open after this process ends.
pub(super) struct OobConnection {
    phase: HandshakePhase,
    input: Vec<u8>,
    output: Vec<u8>,
    /// When a message last arrived.
    pub(super) heard: Instant,
    /// Number of heartbeat intervals since a message last arrived.
    pub(super) missed: u32,
    // In this order, because the guard must be dropped before the file descriptor is closed.
    _unshared: Option<CloseInChild>,
    socket: Arc<OwnedFd>,
}

impl OobConnection {
    fn new(socket: OwnedFd, phase: HandshakePhase) -> Self {
        let unshared = CloseInChild::new(socket.as_fd());
        let (input, output, heard) = (Vec::new(), Vec::new(), Instant::now());
        Self {
            phase,
            input,
            output,
            heard,
            missed: 0,
            _unshared: unshared,
            socket: Arc::new(socket),
        }
    }

    /// Creates the connection of a caller that a hub has accepted, and queues the hub's opening.
    pub(super) fn accepted(socket: OwnedFd) -> Result<Self> {
        let (opening, nonce) = proof::opening(true)?;
        let mut accepted =
            Self::new(socket, HandshakePhase::Unidentified { opening: Box::new(opening), nonce });
        accepted.output.extend_from_slice(&opening);
        Ok(accepted)
    }

    /// Creates the connection of rank `me` to the hub `peer`, after both have proved that they know
    /// the token.
    pub(super) fn connected(socket: OwnedFd, sealer: Sealer, me: Rank, peer: Rank) -> Self {
        let mut made = Self::new(socket, HandshakePhase::Identified { sealer, peer: Some(peer) });
        made.queue(&OobMessage::Hello(me));
        made
    }

    /// Returns the file descriptor to poll.
    pub(super) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// Returns true once both ends have proved to each other that they know the token. The end that
    /// connected may still have to send its rank.
    pub(super) fn identified(&self) -> bool {
        matches!(self.phase, HandshakePhase::Identified { .. })
    }

    /// Returns the rank at the other end, if known.
    pub(super) fn peer(&self) -> Option<Rank> {
        match self.phase {
            HandshakePhase::Unidentified { .. } => None,
            HandshakePhase::Identified { peer, .. } => peer,
        }
    }

    /// Records which rank is at the other end.
    pub(super) fn set_peer(&mut self, rank: Rank) {
        if let HandshakePhase::Identified { peer, .. } = &mut self.phase {
            *peer = Some(rank);
        }
    }

    /// Returns true while bytes are unsent.
    pub(super) fn unsent(&self) -> bool {
        !self.output.is_empty()
    }

    /// Queues `message`, if the peer has proved that it knows the token.
    pub(super) fn queue(&mut self, message: &OobMessage) {
        match &mut self.phase {
            HandshakePhase::Unidentified { .. } => {}
            HandshakePhase::Identified { sealer, .. } => self.output.extend(sealer.seal(message)),
        }
    }

    /// Sends what can be sent now. If the other end is closed, or more than [`UNSENT`] bytes are
    /// queued, discards the queue and sends nothing more, because the next bytes would not continue
    /// the frame that was sent last; later reads on both ends report the failure.
    pub(super) fn write(&mut self) {
        while !self.output.is_empty() {
            match retry(|| {
                send(&self.socket, &self.output, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
            }) {
                Ok(count) => drop(self.output.drain(..count)),
                Err(Errno::AGAIN) if self.output.len() <= UNSENT => return,
                Err(_) => {
                    self.output.clear();
                    let _ = shutdown(&self.socket, Shutdown::Write);
                }
            }
        }
    }

    /// Passes each message that has arrived to `took`.
    ///
    /// # Errors
    /// `Network` if the other end is closed or fails its identification. Messages that arrived
    /// before that are passed on first.
    pub(super) fn read(
        &mut self,
        token: Option<&Token>,
        mut took: impl FnMut(&mut Self, OobMessage) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..TURN {
            let mut piece = [0; PIECE];
            let count = match retry(|| recv(&self.socket, &mut piece, RecvFlags::DONTWAIT)) {
                Ok((0, _)) => return Err(Error::network("closed")),
                Ok((count, _)) => count,
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(Error::network(errno.to_string())),
            };
            self.input.extend_from_slice(&piece[..count]);
            self.authenticate(token)?;
            while let HandshakePhase::Identified { sealer, .. } = &mut self.phase
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

    /// Admits a caller whose complete introduction has arrived, if it is valid.
    fn authenticate(&mut self, token: Option<&Token>) -> Result<()> {
        let HandshakePhase::Unidentified { opening, nonce } = &self.phase else { return Ok(()) };
        if !proof::plausible(&self.input) {
            return Err(Error::network("it speaks another protocol"));
        }
        let Some(hello) = self.input.first_chunk::<HELLO>() else { return Ok(()) };
        let token = token.ok_or_else(|| Error::network("nobody is expected"))?;
        let admission = proof::admit(Some(token), nonce, hello)
            .map_err(|_| Error::network("it does not know the group's token"))?;
        let sealer = Sealer::new(token, opening, hello, ConnectionEnd::Hub);
        self.input.drain(..HELLO);
        self.output.extend_from_slice(&admission);
        self.phase = HandshakePhase::Identified { sealer, peer: None };
        Ok(())
    }

    /// Closes the connection such that the other end still receives everything that was sent.
    pub(super) fn close(self) {
        // Closing with unread input would reset the connection and discard what was sent.
        let mut piece = [0; PIECE];
        while recv(&self.socket, &mut piece, RecvFlags::DONTWAIT)
            .is_ok_and(|(count, _)| count == PIECE)
        {}
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn a_peer_that_reads_too_late_gets_whole_messages_and_the_end() {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .expect("sockets");
        let sealer = |end| Sealer::new(&[0; 16], &[0; OPENING], &[0; HELLO], end);
        let mut sender =
            OobConnection::connected(near, sealer(ConnectionEnd::Leader), Rank(1), Rank(0));
        let mut reader =
            OobConnection::connected(far, sealer(ConnectionEnd::Hub), Rank(0), Rank(1));
        let message = OobMessage::Left(Rank(1), "x".repeat(3000));
        let send = |sender: &mut OobConnection| {
            sender.queue(&message);
            sender.write();
            sender.unsent()
        };
        while !send(&mut sender) {}
        while send(&mut sender) {}
        // The queue was discarded within a message. Later messages must not follow it.
        assert!(!send(&mut sender));
        let mut heard = Vec::new();
        let error = (0..10_000).find_map(|_| {
            let took = |_: &mut OobConnection, message: OobMessage| {
                heard.push(message);
                Ok(())
            };
            reader.read(None, took).err()
        });
        assert_eq!(error, Some(Error::network("closed")));
        assert_eq!(heard.remove(0), OobMessage::Hello(Rank(1)));
        assert!(!heard.is_empty() && heard.iter().all(|heard| *heard == message));
    }
}
