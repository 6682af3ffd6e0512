//! A call that was refused on this rank alone: who waits for it learns so, long before a timeout.
//!
//! The rank that refused is the one to tell: it looks a little later whether a peer has begun a collective that this rank has not, or
//! sleeps for a message of this rank that is not on its way. It cannot see other hosts: it reports to them that it has refused, and when it
//! makes another call, and they check which of their ranks wait. A rank that has made another call by then, or peers that were refused
//! alike, disturb nobody: a rank says how often it has refused, so that whoever refused alike and has gone on is not taken to wait for the
//! refused call. Waiting ranks do no more for this than to say which message they sleep for, and in how many barriers they have met.

use crate::coll::cuda::agreement::launch_log;
use crate::control::{Barriers, ControlBlock};
use crate::engine::Engine;
use crate::error::Error;
use crate::health::Health;
use crate::hosts::Hosts;
use crate::lock::lock;
use crate::messages::Messages;
use crate::rank::{Rank, name_ranks};
use crate::trace::Recorder;
use crate::watch::{self, Subscription};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time from a refusal to the first look: enough to catch the exception and make the right call; a peer that has come by then is told
/// within 100 ms.
const FIRST_LOOK: Duration = Duration::from_millis(80);
/// Time between two looks, for peers that come later.
const NEXT_LOOK: Duration = Duration::from_millis(50);

/// Refusals of this rank that it has not made up for.
pub(super) struct Refusals {
    control: Arc<ControlBlock>,
    recorder: Arc<Recorder>,
    engine: Arc<Engine>,
    messages: Arc<Messages>,
    hosts: Option<Arc<Hosts>>,
    note: Mutex<Option<Note>>,
    /// Whether other hosts know of a refused collective that this rank has not made up for.
    told: AtomicBool,
}

/// Call that was refused.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refused {
    /// A collective. On a device: kernels were in use, so that a launch may be waiting for this rank.
    Collective { on_device: bool },
    /// An operator on symmetric memory of the host.
    Operator,
    /// A send to `peer`, or a receive; `None`: from anybody.
    Message { send: bool, peer: Option<Rank>, tag: i32 },
}

/// Calls of this rank, which make up for what was refused once there are others.
type Requested = (u64, Option<Barriers>);

struct Note {
    text: String,
    refused: Refused,
    /// Calls that this rank had been asked for by then.
    requested: Requested,
    /// True once this rank has reported it to other hosts.
    told: bool,
    look: Option<Subscription>,
}

/// A peer that has begun what this rank has not.
struct Waiting {
    rank: Rank,
    /// Name of a refused call, such as "all_gather, collective #3" or "recv, tag 7,".
    call: String,
}

impl Refusals {
    pub(super) fn new(health: &Health, engine: &Arc<Engine>, messages: &Arc<Messages>, hosts: Option<Arc<Hosts>>) -> Arc<Self> {
        let (control, recorder) = (Arc::clone(health.control()), Arc::clone(health.recorder()));
        let (engine, messages) = (Arc::clone(engine), Arc::clone(messages));
        Arc::new(Self { control, recorder, engine, messages, hosts, note: Mutex::new(None), told: AtomicBool::new(false) })
    }

    /// Notes that a call was refused because of `text`. The last refusal counts.
    pub(super) fn add(self: &Arc<Self>, text: String, refused: Refused) {
        if self.control.size() == 1 && self.hosts.is_none() {
            return;
        }
        let mut note = lock(&self.note);
        if let Refused::Collective { .. } | Refused::Operator = refused {
            let barriers = self.control.barriers(self.control.rank());
            self.control.note_refusal(self.recorder.collectives() + u64::from(barriers.met));
            self.hosts.iter().for_each(|hosts| hosts.note_refused(self.recorder.collectives()));
        }
        let look = self.look_after(FIRST_LOOK);
        *note = Some(Note { text, refused, requested: self.requested(refused), told: false, look });
    }

    /// The calls that make up for what was refused: a collective for a collective, that or a barrier for an operator, any but barriers for a
    /// message. Messages do not make up for a collective: a peer that waits in it begins none meanwhile.
    fn requested(&self, refused: Refused) -> Requested {
        match refused {
            Refused::Collective { .. } => (self.recorder.collectives(), None),
            Refused::Operator => (self.recorder.collectives(), Some(self.control.barriers(self.control.rank()))),
            Refused::Message { .. } => (self.recorder.calls(), None),
        }
    }

    /// Tells other hosts, if they know of a refused collective, that this rank makes a call.
    pub(super) fn make_up(&self) {
        if self.told.load(Ordering::Relaxed) && self.told.swap(false, Ordering::AcqRel) {
            self.hosts.iter().for_each(|hosts| hosts.tell_resumed(self.recorder.collectives() + 1));
        }
    }

    /// Tells other hosts of `note`.
    fn tell_hosts(&self, note: &Note) {
        let Some(hosts) = &self.hosts else { return };
        let (requested, text) = (note.requested.0, &note.text);
        match note.refused {
            Refused::Collective { .. } => {
                self.told.store(true, Ordering::Release);
                hosts.tell_refused(text);
                // A call that began in between has not seen that there is something to make up for.
                if self.recorder.collectives() != requested {
                    self.make_up();
                }
            }
            Refused::Operator => {}
            Refused::Message { send, peer, tag } => self.messages.tell_refused(peer, requested, send, tag, text.clone()),
        }
    }

    /// Forgets all refusals, since this rank leaves: nobody is told any more.
    pub(super) fn forget(&self) {
        drop(lock(&self.note).take());
    }

    fn look_after(self: &Arc<Self>, delay: Duration) -> Option<Subscription> {
        // The watcher does not keep a group.
        let refusals = Arc::downgrade(self);
        let look = move || {
            if let Some(refusals) = refusals.upgrade() {
                let _ = refusals.control.contain(|| {
                    refusals.look();
                    Ok(())
                });
            }
        };
        watch::after(delay, look).inspect_err(|error| log::warn!("ranks that wait for a refused call are not told: {error}")).ok()
    }

    fn look(self: &Arc<Self>) {
        let mut note = lock(&self.note);
        let Some(refused) = note.as_mut() else { return };
        let waiting = self.waiting(refused.refused);
        // After the peers: who waited for a rank that has not moved since waits for it now.
        if self.requested(refused.refused) != refused.requested || self.control.failure().is_some() {
            *note = None;
            return;
        }
        if waiting.is_empty() {
            if !std::mem::replace(&mut refused.told, true) {
                self.tell_hosts(refused);
            }
            refused.look = if self.control.size() > 1 { self.look_after(NEXT_LOOK) } else { None };
            return;
        }
        let (me, group) = (self.control.describe(self.control.rank()), self.control.name());
        let ranks: Vec<Rank> = waiting.iter().map(|waiting| self.control.shown(waiting.rank)).collect();
        let (who, wait) = (name_ranks(&ranks), if ranks.len() == 1 { "waits" } else { "wait" });
        let text = format!(
            "{me} refused a call and has not made it since; {who} {wait} for it in {} of group \"{group}\": {}",
            waiting[0].call, refused.text
        );
        *note = None;
        drop(note);
        self.control.fail(Error::mismatch(text));
    }

    /// By rank.
    fn waiting(&self, refused: Refused) -> Vec<Waiting> {
        let mut all = match refused {
            Refused::Collective { on_device } => self.in_collectives(on_device),
            // A rendezvous is made of collectives.
            Refused::Operator => self.in_barriers().chain(self.in_collectives(false)).collect(),
            Refused::Message { send, peer, tag } => {
                let peers = self.control.peers().filter(|&rank| peer.is_none_or(|peer| peer == self.control.shown(rank)));
                let call = || format!("{}, tag {tag},", if send { "recv" } else { "send" });
                self.messages.awaited_by(peers, !send, tag).map(|rank| Waiting { rank, call: call() }).into_iter().collect()
            }
        };
        if let Refused::Collective { .. } | Refused::Operator = refused {
            let own = self.control.refusals(self.control.rank());
            all.retain(|waiting| !self.control.refusals(waiting.rank).cover(own));
        }
        all.sort_by_key(|waiting| waiting.rank);
        all.dedup_by_key(|waiting| waiting.rank);
        all
    }

    fn in_barriers(&self) -> impl Iterator<Item = Waiting> {
        let own = self.control.barriers(self.control.rank());
        let waits = move |&rank: &Rank| self.control.barriers(rank).wait_for(own);
        self.control.peers().filter(waits).map(|rank| Waiting { rank, call: "a barrier of symmetric memory".into() })
    }

    fn in_collectives(&self, on_device: bool) -> Vec<Waiting> {
        let (me, control) = (self.control.rank(), &self.control);
        let on_host = control.peers().filter_map(|rank| {
            let doing = control.doing(rank)?;
            (doing.number > control.collective(me))
                .then(|| Waiting { rank, call: format!("{}, collective #{}", doing.op.name(), doing.number) })
        });
        let on_devices = control.peers().filter(|_| on_device).filter_map(|rank| {
            let first = launch_log::launched(control, me) + 1;
            (launch_log::launched(control, rank) >= first).then(|| Waiting { rank, call: format!("CUDA collective #{first}") })
        });
        let all: Vec<Waiting> = on_host.chain(on_devices).collect();
        // After the peers: one that is ahead of a rank with something queued may be waiting for that.
        if self.engine.idle() { all } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::{Op, Span, Spec};
    use crate::coll::cpu::Runner;
    use crate::coll::cuda::workspace::layout::Channel;
    use crate::coll::message::{Message, MessageSpec};
    use crate::coll::plan::Thresholds;
    use crate::completion::Completion;
    use crate::control::tests::controls;
    use crate::dtype::{DType, ReduceOp};
    use crate::error::Kind;
    use crate::trace::Target;
    use std::time::Instant;

    /// Three ranks of this process.
    fn ranks() -> Vec<Arc<Refusals>> {
        let rank = |control: ControlBlock| {
            let control = Arc::new(control);
            let recorder = Recorder::new(&control, Duration::from_secs(1));
            let health = Health::new(&control, &Arc::default(), &recorder);
            let engine = Engine::new(Runner::new(Arc::clone(&control), Thresholds::default(), Arc::default()), &health);
            Refusals::new(&health, &engine, &Messages::new(&health, false), None)
        };
        controls(3).into_iter().map(rank).collect()
    }

    fn launch(refusals: &Refusals, number: u64) {
        let spans = vec![Span { addr: 0, bytes: 4 }];
        let (op, dtype, reduce_op) = (Op::AllReduce, DType::F32, ReduceOp::Sum);
        let call =
            Spec { op, dtype, reduce_op, root: Rank(0), factor: 1.0, inputs: spans.clone().into(), outputs: spans.into(), call_site: None };
        launch_log::compare(&refusals.control, number, &call, Channel::Collectives).expect("all alike");
    }

    fn failure_within(refusals: &Refusals, limit: Duration) -> Option<Error> {
        let begun = Instant::now();
        while begun.elapsed() < limit {
            if let Some(failure) = refusals.control.failure() {
                return Some(failure);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    const ON_HOST: Refused = Refused::Collective { on_device: false };
    const QUIET: Duration = Duration::from_millis(250);

    #[test]
    fn peers_that_wait_for_a_refused_call_are_told_now_or_later() {
        for later in [false, true] {
            let ranks = ranks();
            ranks[1].add("no such dtype".into(), ON_HOST);
            if later {
                assert_eq!(failure_within(&ranks[0], QUIET), None, "nobody waits");
            }
            ranks[0].control.begin(1, Op::AllGather);
            ranks[2].control.begin(1, Op::AllGather);
            let failure = failure_within(&ranks[0], Duration::from_secs(5)).expect("reported");
            assert_eq!(failure.kind, Kind::Mismatch);
            let pid = std::process::id();
            let text = format!(
                "rank 1 (pid {pid}) refused a call and has not made it since; ranks 0 and 2 wait for it in all_gather, collective #1 of group \"test\": no such dtype"
            );
            assert_eq!(failure.message, text);
            assert_eq!(ranks[2].control.failure(), Some(failure));
        }
    }

    #[test]
    fn a_launch_that_waits_for_a_refused_one_is_told() {
        let ranks = ranks();
        ranks.iter().for_each(|rank| launch(rank, 1));
        ranks[1].add("no such dtype".into(), Refused::Collective { on_device: true });
        launch(&ranks[0], 2);
        let failure = failure_within(&ranks[0], Duration::from_secs(5)).expect("reported");
        assert!(failure.message.contains("rank 0 waits for it in CUDA collective #2"), "{failure}");
    }

    #[test]
    fn peers_that_do_not_wait_are_left_alone() {
        let (forgetful, moved_on, alike) = (ranks(), ranks(), ranks());
        forgetful[1].add("left".into(), ON_HOST);
        forgetful[1].forget();
        moved_on[1].add("made up for".into(), ON_HOST);
        moved_on[1].recorder.ask(1);
        for ranks in [&forgetful, &moved_on] {
            ranks[0].control.begin(1, Op::Barrier);
            assert_eq!(failure_within(&ranks[0], QUIET), None);
        }
        alike.iter().for_each(|rank| rank.control.begin(1, Op::Barrier));
        alike.iter().for_each(|rank| rank.add("all alike".into(), Refused::Collective { on_device: true }));
        assert_eq!(failure_within(&alike[0], QUIET), None);
    }

    #[test]
    fn a_rank_that_is_late_after_all_have_refused_fails_nobody() {
        for refused in [ON_HOST, Refused::Operator] {
            let ranks = ranks();
            let refuse = |rank: usize, why: &str| ranks[rank].add(why.into(), refused);
            (0..3).for_each(|rank| refuse(rank, "all alike"));
            [0, 2].into_iter().for_each(|rank| ranks[rank].control.begin(1, Op::Barrier));
            assert_eq!(failure_within(&ranks[0], QUIET), None, "the others have refused it, too, and are one further");
            // The call in which they wait is refused as well.
            refuse(1, "again");
            let failure = failure_within(&ranks[0], Duration::from_secs(5)).expect("reported");
            assert!(failure.message.ends_with("of group \"test\": again"), "{failure}");
        }
    }

    #[test]
    fn peers_that_wait_in_a_barrier_for_a_refused_operator_are_told() {
        // Whether rank 1 comes to the barrier after all, or had met the others in it before.
        for (comes, had_met) in [(false, false), (true, false), (false, true)] {
            let ranks = ranks();
            let enter = |rank: usize| ranks[rank].control.enter_barrier();
            if had_met {
                enter(1);
                ranks[1].control.leave_barrier(true);
            }
            ranks[1].add("not contiguous".into(), Refused::Operator);
            [0, 2].into_iter().for_each(enter);
            if comes {
                enter(1);
            }
            let told = !comes && !had_met;
            let failure = failure_within(&ranks[0], if told { Duration::from_secs(5) } else { QUIET });
            let pid = std::process::id();
            let text = format!(
                "rank 1 (pid {pid}) refused a call and has not made it since; ranks 0 and 2 wait for it in a barrier of symmetric memory of group \"test\": not contiguous"
            );
            assert_eq!(failure, told.then(|| Error::mismatch(text)), "comes: {comes}, had met: {had_met}");
        }
    }

    /// Sends as a group does.
    fn send(rank: &Refusals, message: Message) {
        rank.recorder.message(true, &message, PATIENCE, Target::Host);
        rank.messages.send(message, PATIENCE, Completion::new(|_, _| {})).expect("sent");
    }

    fn message(peer: Rank) -> Message {
        let span = Span { addr: std::ptr::dangling::<u8>() as usize, bytes: 0 };
        Message::of(MessageSpec { peer: Some(peer), tag: 7, dtype: DType::U8, span, timeout: None })
    }

    const PATIENCE: Duration = Duration::from_secs(5);

    #[test]
    fn a_peer_that_sleeps_for_a_refused_message_is_told() {
        // What rank 1 refused, whom rank 0 waits for, and whether that is the same.
        let refused = |peer, tag| Refused::Message { send: true, peer, tag };
        for (refused, peer, reported) in [
            (refused(Some(Rank(0)), 7), Rank(1), true),
            (refused(Some(Rank(0)), 8), Rank(1), false),
            (refused(Some(Rank(2)), 7), Rank(1), false),
            (refused(Some(Rank(0)), 7), Rank(2), false),
            (Refused::Message { send: false, peer: None, tag: 7 }, Rank(1), false),
        ] {
            let ranks = ranks();
            let first = &ranks[0].messages;
            std::thread::scope(|scope| {
                let ticket = first.recv(message(peer), PATIENCE, Completion::new(|_, _| {})).expect("begun");
                let waiting = scope.spawn(move || first.wait(ticket, None));
                ranks[1].add("too short".into(), refused);
                let failure = failure_within(&ranks[2], if reported { PATIENCE } else { QUIET });
                assert_eq!(failure.is_some(), reported, "{refused:?}, from {peer}");
                if let Some(failure) = failure {
                    let pid = std::process::id();
                    let text = format!(
                        "rank 1 (pid {pid}) refused a call and has not made it since; rank 0 waits for it in recv, tag 7, of group \"test\": too short"
                    );
                    assert_eq!((failure.kind, failure.message), (Kind::Mismatch, text));
                }
                ranks[0].control.fail(Error::aborted("over"));
                waiting.join().expect("no panic").expect("its completion was called");
                ranks.iter().for_each(|rank| rank.messages.stop());
            });
        }
    }

    #[test]
    fn a_message_does_not_make_up_for_a_refused_collective() {
        let ranks = ranks();
        ranks[1].add("no such dtype".into(), ON_HOST);
        send(&ranks[1], message(Rank(0)));
        ranks[0].control.begin(1, Op::AllGather);
        let failure = failure_within(&ranks[0], PATIENCE).expect("reported");
        assert!(failure.message.contains("rank 0 waits for it in all_gather, collective #1"), "{failure}");
    }

    #[test]
    fn a_refused_message_that_is_made_up_for_disturbs_nobody() {
        let ranks = ranks();
        let quiet = || Completion::new(|_, _| {});
        let messages = &ranks[0].messages;
        std::thread::scope(|scope| {
            ranks[1].add("too short".into(), Refused::Message { send: true, peer: Some(Rank(0)), tag: 7 });
            send(&ranks[1], message(Rank(0)));
            let receive = |_| messages.recv(message(Rank(1)), PATIENCE, quiet()).expect("begun");
            let [first, second] = [(); 2].map(receive);
            messages.wait(first, None).expect("it came");
            let waiting = scope.spawn(move || messages.wait(second, None));
            assert_eq!(failure_within(&ranks[0], QUIET), None);
            ranks[0].control.fail(Error::aborted("over"));
            waiting.join().expect("no panic").expect("its completion was called");
            ranks.iter().for_each(|rank| rank.messages.stop());
        });
    }
}
