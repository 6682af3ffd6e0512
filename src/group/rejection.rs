//! Rejected calls: if only this rank rejects a call, the ranks that wait for it learn of the
//! rejection long before they time out.
//!
//! The rejecting rank reports it. After a short time it checks whether a peer has started a
//! collective that this rank has not, or sleeps for a message that this rank has not sent. It
//! cannot see the ranks of other nodes. It therefore notifies the other nodes when it has rejected
//! a call and when it makes another call, and they check which of their ranks wait.
//!
//! If the rank has made another call by then, the group does not fail. The group does not fail
//! either if all ranks rejected the call: every rank counts its rejections, so a rank that also
//! rejected the call and went on does not count as waiting for it. A waiting rank only publishes
//! which message it sleeps for and how many barriers it has passed.

use crate::call_queue::CallQueue;
use crate::coll::cuda::agreement::launch_log;
use crate::control::{BarrierCount, ControlBlock};
use crate::error::Error;
use crate::exit_watch::{self, Subscription};
use crate::health::Health;
use crate::internode::Internode;
use crate::lock::lock;
use crate::messages::Messages;
use crate::rank::{Rank, name_ranks};
use crate::trace::GroupRecorder;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time between a rejection and the first check. It suffices to catch the exception and make the
/// correct call, and a peer that waits by then learns of the rejection within 100 ms.
const REJECTION_DELAY: Duration = Duration::from_millis(80);
/// Interval of later checks, for peers that arrive later.
const REJECTION_POLL: Duration = Duration::from_millis(50);

/// Rejections of this rank after which it has made no other call.
pub(super) struct LocalRejections {
    control: Arc<ControlBlock>,
    recorder: Arc<GroupRecorder>,
    queue: Arc<CallQueue>,
    messages: Arc<Messages>,
    internode: Option<Arc<Internode>>,
    note: Mutex<Option<RejectionNote>>,
    /// True while other nodes know of a rejected collective after which this rank has made no other
    /// call.
    notified: AtomicBool,
}

/// A rejected call.
#[derive(Clone, Copy, Debug)]
pub(super) enum RejectedCall {
    /// A collective. `on_device`: kernels were in use, so a launched kernel may be waiting for this
    /// rank.
    Collective { on_device: bool },
    /// An operator on symmetric memory of the host.
    Operator,
    /// A send to `peer`, or a receive; `None`: from any source.
    Message { send: bool, peer: Option<Rank>, tag: i32 },
}

/// Numbers of calls of this rank. Once they have grown, this rank has made another call after a
/// rejection.
type CallsMade = (u64, Option<BarrierCount>);

struct RejectionNote {
    text: String,
    rejected: RejectedCall,
    /// The calls that this rank had made before the rejection.
    calls_made: CallsMade,
    /// True once this rank has reported it to other nodes.
    notified: bool,
    look: Option<Subscription>,
}

/// A peer that has started a call that this rank has not.
struct BlockedPeer {
    rank: Rank,
    /// Name of the rejected call, such as "all_gather, collective #3" or "recv, tag 7,".
    call: String,
}

impl LocalRejections {
    pub(super) fn new(
        health: &Health,
        queue: &Arc<CallQueue>,
        messages: &Arc<Messages>,
        internode: Option<Arc<Internode>>,
    ) -> Arc<Self> {
        let (control, recorder) = (Arc::clone(health.control()), Arc::clone(health.recorder()));
        let (queue, messages) = (Arc::clone(queue), Arc::clone(messages));
        Arc::new(Self {
            control,
            recorder,
            queue,
            messages,
            internode,
            note: Mutex::new(None),
            notified: AtomicBool::new(false),
        })
    }

    /// Records that a call was rejected because of `text`, in place of earlier rejections.
    pub(super) fn add(self: &Arc<Self>, text: String, refused: RejectedCall) {
        if self.control.size() == 1 && self.internode.is_none() {
            return;
        }
        let mut note = lock(&self.note);
        if let RejectedCall::Collective { .. } | RejectedCall::Operator = refused {
            let barriers = self.control.barriers(self.control.rank());
            let (calls, on_host) = (self.recorder.collectives(), self.recorder.on_host());
            self.control.note_rejection(calls + u64::from(barriers.met));
            self.internode.iter().for_each(|internode| internode.note_rejected(calls, on_host));
        }
        let look = self.poll_until_settled(REJECTION_DELAY);
        *note = Some(RejectionNote {
            text,
            rejected: refused,
            calls_made: self.calls_made(refused),
            notified: false,
            look,
        });
    }

    /// Returns how many calls this rank has made of the kinds that end the rejection of `refused`.
    /// The next collective ends any rejection. The next barrier also ends the rejection of an
    /// operator, and the next message that of a message. A message does not end the rejection of a
    /// collective, because a peer that waits in the collective starts no message meanwhile.
    fn calls_made(&self, refused: RejectedCall) -> CallsMade {
        match refused {
            RejectedCall::Collective { .. } => (self.recorder.collectives(), None),
            RejectedCall::Operator => {
                (self.recorder.collectives(), Some(self.control.barriers(self.control.rank())))
            }
            RejectedCall::Message { .. } => (self.recorder.calls(), None),
        }
    }

    /// Reports to other nodes that this rank makes a call, if they know of a rejected collective.
    pub(super) fn resume(&self) {
        if self.notified.load(Ordering::Relaxed) && self.notified.swap(false, Ordering::AcqRel) {
            self.internode
                .iter()
                .for_each(|internode| internode.broadcast_resumed(self.recorder.collectives() + 1));
        }
    }

    /// Reports `note` to other nodes.
    fn broadcast_to_nodes(&self, note: &RejectionNote) {
        let Some(internode) = &self.internode else { return };
        let (requested, text) = (note.calls_made.0, &note.text);
        match note.rejected {
            RejectedCall::Collective { .. } => {
                self.notified.store(true, Ordering::Release);
                internode.broadcast_rejection(text);
                // A call that started after the rejection and before `notified` was set has not
                // reported itself.
                if self.recorder.collectives() != requested {
                    self.resume();
                }
            }
            RejectedCall::Operator => {}
            RejectedCall::Message { send, peer, tag } => {
                self.messages.notify_rejected(peer, requested, send, tag, text.clone())
            }
        }
    }

    /// Drops all rejections because this rank leaves; no peer is notified any more.
    pub(super) fn forget(&self) {
        drop(lock(&self.note).take());
    }

    fn poll_until_settled(self: &Arc<Self>, delay: Duration) -> Option<Subscription> {
        // A weak reference, so that the watcher does not keep a group.
        let refusals = Arc::downgrade(self);
        let look = move || {
            if let Some(refusals) = refusals.upgrade() {
                let _ = refusals.control.contain(|| {
                    refusals.poll();
                    Ok(())
                });
            }
        };
        exit_watch::after(delay, look)
            .inspect_err(|error| {
                log::warn!("ranks that wait for a refused call are not told: {error}")
            })
            .ok()
    }

    fn poll(self: &Arc<Self>) {
        let mut note = lock(&self.note);
        let Some(refused) = note.as_mut() else { return };
        let waiting = self.waiting(refused.rejected);
        // Checked after the peers: if this rank has still made no other call, a peer that waited
        // for it still waits.
        if self.calls_made(refused.rejected) != refused.calls_made
            || self.control.failure().is_some()
        {
            *note = None;
            return;
        }
        if waiting.is_empty() {
            if !std::mem::replace(&mut refused.notified, true) {
                self.broadcast_to_nodes(refused);
            }
            refused.look = if self.control.size() > 1 {
                self.poll_until_settled(REJECTION_POLL)
            } else {
                None
            };
            return;
        }
        let (me, group) = (self.control.describe(self.control.rank()), self.control.name());
        let ranks: Vec<Rank> =
            waiting.iter().map(|waiting| self.control.display_rank(waiting.rank)).collect();
        let (who, wait) =
            (name_ranks(&ranks), if ranks.len() == 1 { "is blocked" } else { "are blocked" });
        let text = format!(
            "{me} rejected a call and has not repeated it since; {who} {wait} in {} of \
             group \"{group}\": {}",
            waiting[0].call, refused.text
        );
        *note = None;
        drop(note);
        self.control.fail(Error::mismatch(text));
    }

    /// Returns the peers that wait for the rejected call, as their published states show.
    fn waiting(&self, refused: RejectedCall) -> Vec<BlockedPeer> {
        let mut all = match refused {
            RejectedCall::Collective { on_device } => self.in_collectives(on_device),
            // Peers may also wait in a rendezvous, which consists of collectives.
            RejectedCall::Operator => {
                self.in_barriers().chain(self.in_collectives(false)).collect()
            }
            RejectedCall::Message { send, peer, tag } => {
                let peers = self.control.peers().filter(|&rank| {
                    peer.is_none_or(|peer| peer == self.control.display_rank(rank))
                });
                let call = || format!("{}, tag {tag},", if send { "recv" } else { "send" });
                self.messages
                    .awaited_by(peers, !send, tag)
                    .map(|rank| BlockedPeer { rank, call: call() })
                    .into_iter()
                    .collect()
            }
        };
        if let RejectedCall::Collective { .. } | RejectedCall::Operator = refused {
            let own = self.control.rejections(self.control.rank());
            all.retain(|waiting| !self.control.rejections(waiting.rank).cover(own));
        }
        all.sort_by_key(|waiting| waiting.rank);
        all.dedup_by_key(|waiting| waiting.rank);
        all
    }

    fn in_barriers(&self) -> impl Iterator<Item = BlockedPeer> {
        let own = self.control.barriers(self.control.rank());
        let waits = move |&rank: &Rank| self.control.barriers(rank).wait_for(own);
        self.control
            .peers()
            .filter(waits)
            .map(|rank| BlockedPeer { rank, call: "a barrier of symmetric memory".into() })
    }

    fn in_collectives(&self, on_device: bool) -> Vec<BlockedPeer> {
        let (me, control) = (self.control.rank(), &self.control);
        let on_node = control.peers().filter_map(|rank| {
            let doing = control.current_call(rank)?;
            (doing.number > control.collective(me)).then(|| BlockedPeer {
                rank,
                call: format!("{}, collective #{}", doing.op.name(), doing.number),
            })
        });
        let on_devices = control.peers().filter(|_| on_device).filter_map(|rank| {
            let first = launch_log::launched(control, me) + 1;
            (launch_log::launched(control, rank) >= first)
                .then(|| BlockedPeer { rank, call: format!("CUDA collective #{first}") })
        });
        let all: Vec<BlockedPeer> = on_node.chain(on_devices).collect();
        // Checked after the peers: if this rank has queued calls, a peer that is ahead of it may
        // wait for one of these calls.
        if self.queue.idle() { all } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests;
