//! How messages end: completions, failures, and the end of all messages at once.

use super::peer::Peer;
use super::ring::RingLink;
use super::wire::LinkPhase;
use super::{ChunkedReceive, MessageTable, Messages, PayloadSource, PendingSend};
use crate::control::ControlBlock;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::health::FailureListener;
use crate::rank::Rank;
use crate::sync::timeout::CallTimeout;
use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// Returns the error of a wait that timed out before its message completed.
pub(super) fn gave_up(since: Instant) -> Error {
    Error::wait_timeout(format!(
        "wait() gave up after {:.1} s; the transfer itself goes on",
        since.elapsed().as_secs_f32()
    ))
}

/// Returns the name of a message within a node for errors.
pub(super) fn about(control: &ControlBlock, name: &str, bytes: usize, tag: i32) -> String {
    format!("{name}({bytes} bytes, tag {tag}) of group \"{}\"", control.name())
}

/// Returns true if `error` says that a connection is broken, false if it concerns received data.
pub(super) fn is_broken(error: &Error) -> bool {
    matches!(error.kind, ErrorKind::Peer | ErrorKind::Network)
}

/// Returns the error for the loss of the link to `whom` because of `error`. `urgent` is the name of
/// a pending message that needs the link, and the seconds that it has waited.
pub(super) fn lost_link(
    control: &ControlBlock,
    whom: &str,
    urgent: Option<&(String, f32)>,
    error: Error,
) -> Error {
    let (me, group) = (control.describe(control.rank()), control.name());
    match urgent {
        _ if !is_broken(&error) => error,
        Some((what, seconds)) => Error::peer(format!(
            "{me} lost its connection to {whom} after {seconds:.1} s in {what}: {}",
            error.message
        )),
        None => Error {
            message: format!(
                "{me} has lost its connection to {whom} in group \"{group}\": {}",
                error.message
            ),
            ..error
        },
    }
}

/// A pending send or receive, as error messages name it.
pub(super) struct TransferLabel<'a> {
    pub(super) name: &'static str,
    /// The peer; `None` for any source.
    pub(super) peer: Option<Rank>,
    pub(super) tag: i32,
    pub(super) dtype: DType,
    pub(super) bytes: usize,
    pub(super) limit: &'a CallTimeout,
}

impl TransferLabel<'_> {
    /// Returns the name of the transfer for errors about ranks of other nodes.
    fn about_internode(&self, control: &ControlBlock) -> String {
        let (name, bytes, dtype, tag, group) =
            (self.name, self.bytes, self.dtype.name(), self.tag, control.name());
        format!("{name}({bytes} bytes, {dtype}, tag {tag}) of group \"{group}\"")
    }
}

/// Peers of this node that have left or died, each with the reason. They are determined before
/// their rings are read; otherwise a last message could be missed.
struct LostPeers {
    absent: Vec<(Rank, String)>,
    dead: Option<(Rank, String)>,
}

impl LostPeers {
    /// `late`: a message has timed out.
    fn among(control: &ControlBlock, late: bool) -> Self {
        let reason = |peer| Some((peer, control.exit_reason_of_awaited(peer, late)?));
        let absent = control.peers().filter_map(reason).collect();
        Self { absent, dead: control.failed_rank() }
    }

    /// Returns the peer whose exit ends a message with `peer`: `peer` itself, or any member that
    /// has failed. If `peer` is `None`, for any source, all peers must have left; `far` is true if
    /// a rank of another node may also complete the message.
    fn ends(
        &self,
        control: &ControlBlock,
        peer: Option<Rank>,
        far: bool,
    ) -> Option<&(Rank, String)> {
        let needed = match peer {
            Some(peer) => self.absent.iter().find(|(rank, _)| control.display_rank(*rank) == peer),
            None if far => None,
            None => self.absent.first().filter(|_| self.absent.len() + 1 == control.size()),
        };
        needed.or(self.dead.as_ref())
    }
}

impl MessageTable {
    pub(super) fn limits(&self) -> impl Iterator<Item = &CallTimeout> {
        self.pending().map(|pending| pending.limit)
    }

    pub(super) fn pending(&self) -> impl Iterator<Item = TransferLabel<'_>> {
        let receives = self.matching.posted.iter().map(|posted| (posted, posted.peer));
        // Once a rank has started to send the message of a receive from any source, the receive
        // needs that rank.
        let streams = self.streams.iter().map(|((from, _), stream)| (&stream.posted, Some(*from)));
        let receives = receives.chain(streams).map(|(posted, peer)| TransferLabel {
            name: "recv",
            peer,
            tag: posted.tag,
            dtype: posted.dtype,
            bytes: posted.span.bytes,
            limit: &posted.limit,
        });
        let send = |send: &PendingSend| (Some(send.peer), send.tag, send.dtype, send.span.bytes);
        let sends = self.sends.values().map(move |sending| {
            let (peer, tag, dtype, bytes) = send(sending);
            TransferLabel { name: "send", peer, tag, dtype, bytes, limit: &sending.limit }
        });
        receives.chain(sends)
    }

    /// Returns the message with `peer` whose deadline is next, and the time until then.
    pub(super) fn most_urgent(&self, peer: Rank) -> Option<(TransferLabel<'_>, Duration)> {
        let with = self.pending().filter(|pending| pending.peer == Some(peer));
        with.map(|pending| (pending.limit.remaining().unwrap_or_default(), pending))
            .min_by_key(|(left, _)| *left)
            .map(|(left, pending)| (pending, left))
    }

    /// Returns the name of the message that [`Self::most_urgent`] returns, and how many seconds it
    /// has waited, for the error about a lost link.
    pub(super) fn urgent(&self, control: &ControlBlock, peer: Rank) -> Option<(String, f32)> {
        self.most_urgent(peer).map(|(pending, _)| {
            (pending.about_internode(control), pending.limit.elapsed().as_secs_f32())
        })
    }

    /// Returns the error of a pending message that can never complete or has timed out, if any.
    fn unreachable_error(&self, control: &ControlBlock, lost: &LostPeers) -> Option<Error> {
        self.pending().find_map(|pending| {
            let late = pending.limit.remaining().is_none();
            if pending.peer.is_some_and(|peer| self.is_internode(peer)) {
                let dead = lost.dead.as_ref().map(|(rank, how)| control.exit_error(*rank, how));
                return dead.or_else(|| late.then(|| self.late(control, &pending)));
            }
            let end = lost.ends(control, pending.peer, self.reaches);
            end.map(|end| self.ended(control, &pending, end))
                .or_else(|| late.then(|| self.late(control, &pending)))
        })
    }

    /// Returns the error of a message that has timed out.
    fn late(&self, control: &ControlBlock, pending: &TransferLabel<'_>) -> Error {
        let (me, seconds) =
            (control.describe(control.rank()), pending.limit.elapsed().as_secs_f32());
        let near = || about(control, pending.name, pending.bytes, pending.tag);
        let (what, whom) = match pending.peer.map(|peer| &self.peers[peer.index()]) {
            Some(Peer::Internode(wire)) => {
                let state = match (&wire.phase, pending.name) {
                    (LinkPhase::Idle | LinkPhase::Connecting, _) => {
                        "which has begun no message with it"
                    }
                    (LinkPhase::Open | LinkPhase::Lost(_), "send") => "which did not receive it",
                    (LinkPhase::Open | LinkPhase::Lost(_), _) => "which did not send it",
                };
                (pending.about_internode(control), format!("{}, {state}", wire.name))
            }
            Some(peer) => {
                let peer = peer.ring().map_or(control.rank(), |ring| ring.peer);
                (near(), control.states_of(&[peer], |rank| control.activity(rank)))
            }
            None if self.reaches => {
                let blind = self.blind.as_ref().map_or_else(String::new, |error| {
                    format!(" (the store cannot be asked: {})", error.message)
                });
                (near(), format!("any rank{blind}"))
            }
            None => (near(), "any rank".into()),
        };
        Error::timeout(format!(
            "{me} reached its timeout after {seconds:.1} s in {what}, waiting for {whom}"
        ))
    }

    /// Returns the error of a message that ends because of `end`, the exit of a rank of this node.
    fn ended(
        &self,
        control: &ControlBlock,
        pending: &TransferLabel<'_>,
        (end, how): &(Rank, String),
    ) -> Error {
        let what = about(control, pending.name, pending.bytes, pending.tag);
        let (me, seconds) =
            (control.describe(control.rank()), pending.limit.elapsed().as_secs_f32());
        let other = pending.peer.filter(|&peer| peer != control.display_rank(*end));
        let whom =
            other.map_or_else(|| "it".into(), |peer| self.peers[peer.index()].describe(control));
        Error::peer(format!(
            "{} {how}; {me} had waited {seconds:.1} s for {whom} in {what}",
            control.describe(*end)
        ))
    }

    fn fail_all(&mut self, error: &Error) {
        // The failure becomes visible before the owners of the tensors write to them again: see
        // `end_step`.
        fence(Ordering::Release);
        self.closed.get_or_insert_with(|| error.clone());
        let posted = std::mem::take(&mut self.matching.posted);
        // The memory of a receive into which a thread is reading stays in use until that step ends;
        // the step then fails as well.
        let being_read = |(_, stream): &(_, ChunkedReceive)| {
            matches!(stream.source, PayloadSource::BeingRead(_))
        };
        let (kept, streams): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.streams).into_iter().partition(being_read);
        self.streams = kept;
        for posted in posted.into_iter().chain(streams.into_values().map(|stream| stream.posted)) {
            self.finish(posted.ticket, posted.completion, Err(error.clone()), None);
        }
        for (ticket, send) in std::mem::take(&mut self.sends) {
            self.finish(ticket, send.completion, Err(error.clone()), None);
        }
        self.peers.iter_mut().filter_map(Peer::ring_mut).for_each(RingLink::release_span);
    }
}

impl FailureListener for Messages {
    /// Leaves the completions to a thread that waits or a progress thread, because a thread that
    /// reports failures may not run code of the program: one thread of the process carries the
    /// heartbeats of all its groups.
    fn failed(&self, failure: &Error) {
        let mut state = self.lock();
        state.fail_all(failure);
        self.defer_completions(state);
        self.disconnect_soon();
    }
}

impl Messages {
    /// Completes all pending messages with `error`; no message starts afterwards.
    pub fn close(&self, error: &Error) {
        let mut state = self.lock();
        state.fail_all(error);
        self.run_completions(state);
        self.disconnect_soon();
    }

    fn disconnect_soon(&self) {
        if let Some(far) = self.internode.get() {
            self.disconnect(far, Duration::ZERO);
        }
    }

    /// Completes all pending messages with `error`, because this rank leaves the group with
    /// `farewell`. If a send is pending, the rank publishes its exit before the send fails, so that
    /// a receiver that reads the sender's memory knows that the memory may be reused.
    pub fn shut_down(&self, error: &Error, farewell: &str) {
        let mut state = self.lock();
        if !state.sends.is_empty() {
            self.control.note_departure(farewell);
        }
        state.fail_all(error);
        self.run_completions(state);
        if let Some(far) = self.internode.get() {
            self.leave_internode(far);
        }
    }

    /// Returns the value of `moved`. If `moved` is an error, fails the whole group and returns
    /// true.
    pub(super) fn fail_group_on_error(
        &self,
        state: &mut MessageTable,
        moved: Result<bool>,
    ) -> bool {
        moved.unwrap_or_else(|error| {
            self.fail_under_lock(state, error);
            true
        })
    }

    /// Fails the group on this node. `complete` notifies the other nodes, without the lock.
    fn fail_under_lock(&self, state: &mut MessageTable, error: Error) {
        let error = self.control.fail(error);
        state.unnotified = Some(error.clone());
        state.fail_all(&error);
    }

    /// Flushes frames to ranks of other nodes, and calls the completions that are due, without the
    /// lock. Each stays in the table until its turn, because a completion may wait for a message
    /// whose completion is due after it. Does not call those that become due meanwhile: the thread
    /// may wait for a message that has ended, or with a limit.
    pub(super) fn complete(&self, mut state: MutexGuard<'_, MessageTable>) {
        let mut left = state.finished.len();
        let (mut due, untold) = (self.begin_completion(&mut state), state.unnotified.take());
        drop(state);
        self.tell(untold);
        while let Some((finished, role)) = due {
            let ticket = finished.ticket;
            finished.complete();
            let mut state = self.lock();
            state.open.remove(&ticket);
            state.progress.leave_completion(role);
            left = left.saturating_sub(1);
            due = if left > 0 { self.begin_completion(&mut state) } else { None };
            drop(state);
            // Other threads of this rank may sleep until this message is complete.
            self.control.wake_sleepers();
        }
    }

    /// As `complete`, but leaves the completions to the threads that wait and to the progress
    /// thread.
    pub(super) fn defer_completions(&self, mut state: MutexGuard<'_, MessageTable>) {
        let (due, untold) = (!state.finished.is_empty(), state.unnotified.take());
        if due && state.idle {
            self.begun.notify_all();
        }
        drop(state);
        if due {
            self.control.wake_sleepers();
        }
        self.tell(untold);
    }

    /// Flushes frames to ranks of other nodes, and fails the group there with `untold`.
    fn tell(&self, untold: Option<Error>) {
        self.flush();
        if let Some(error) = untold {
            self.health.fail(error);
        }
    }

    /// Fails the group if a pending message can never complete.
    pub(super) fn fail_if_lost(&self) {
        if self.lock().open.is_empty() {
            return;
        }
        let told = self.internode.get().and_then(|_| self.health.error());
        let mut state = self.lock();
        self.fail_hopeless(&mut state);
        // If a rank of this node has died, `fail_hopeless` has set an error with more details.
        if let (Some(error), None) = (told, &state.closed) {
            state.fail_all(&error);
        }
        let lost = state.ask_whether_rejected();
        self.run_completions(state);
        for (peer, error) in lost {
            self.fail_peer(peer, error);
        }
    }

    pub(super) fn fail_hopeless(&self, state: &mut MessageTable) {
        let late = state.limits().any(|limit| limit.remaining().is_none());
        let lost = LostPeers::among(&self.control, late);
        // Messages that a peer wrote before it exited are still delivered.
        self.advance(state);
        if let Some(failure) = self.control.failure() {
            state.fail_all(&failure);
        } else if let Some(error) = state.unreachable_error(&self.control, &lost) {
            self.fail_under_lock(state, error);
        }
    }
}
