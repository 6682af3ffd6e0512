use super::*;
use crate::coll::call::{Collective, Span};
use crate::coll::cpu::CpuRunner;
use crate::coll::cuda::workspace::layout::Channel;
use crate::coll::message::{Message, MessageSpec};
use crate::coll::plan::CpuThresholds;
use crate::completion::Completion;
use crate::control::tests::controls;
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::trace::CallTarget;
use std::time::Instant;

/// Three ranks of this process.
fn ranks() -> Vec<Arc<LocalRejections>> {
    let rank = |control: ControlBlock| {
        let control = Arc::new(control);
        let recorder = GroupRecorder::new(&control, Duration::from_secs(1));
        let health = Health::new(&control, &Arc::default(), &recorder);
        let queue = CallQueue::new(
            CpuRunner::new(Arc::clone(&control), CpuThresholds::default(), Arc::default()),
            &health,
        );
        LocalRejections::new(&health, &queue, &Messages::new(&health, false), None)
    };
    controls(3).into_iter().map(rank).collect()
}

fn launch(refusals: &LocalRejections, number: u64) {
    launch_log::compare(
        &refusals.control,
        number,
        &launch_log::tests::sum(4),
        Channel::Collectives,
    )
    .expect("all alike");
}

fn failure_within(refusals: &LocalRejections, limit: Duration) -> Option<Error> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        if let Some(failure) = refusals.control.failure() {
            return Some(failure);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

const ON_NODE: RejectedCall = RejectedCall::Collective { on_device: false };
const QUIET: Duration = Duration::from_millis(250);

#[test]
fn a_launch_that_waits_for_a_refused_one_is_told() {
    let ranks = ranks();
    ranks.iter().for_each(|rank| launch(rank, 1));
    ranks[1].add("no such dtype".into(), RejectedCall::Collective { on_device: true });
    launch(&ranks[0], 2);
    let failure = failure_within(&ranks[0], Duration::from_secs(5)).expect("reported");
    assert!(failure.message.contains("rank 0 is blocked in CUDA collective #2"), "{failure}");
}

#[test]
fn peers_that_do_not_wait_are_left_alone() {
    let (forgetful, moved_on, alike) = (ranks(), ranks(), ranks());
    forgetful[1].add("left".into(), ON_NODE);
    forgetful[1].forget();
    moved_on[1].add("made up for".into(), ON_NODE);
    moved_on[1].recorder.ask(1);
    for ranks in [&forgetful, &moved_on] {
        ranks[0].control.begin(1, Collective::Barrier);
        assert_eq!(failure_within(&ranks[0], QUIET), None);
    }
    alike.iter().for_each(|rank| rank.control.begin(1, Collective::Barrier));
    alike.iter().for_each(|rank| {
        rank.add("all alike".into(), RejectedCall::Collective { on_device: true })
    });
    assert_eq!(failure_within(&alike[0], QUIET), None);
}

#[test]
fn a_rank_that_is_late_after_all_have_refused_fails_nobody() {
    for refused in [ON_NODE, RejectedCall::Operator] {
        let ranks = ranks();
        let refuse = |rank: usize, why: &str| ranks[rank].add(why.into(), refused);
        (0..3).for_each(|rank| refuse(rank, "all alike"));
        [0, 2].into_iter().for_each(|rank| ranks[rank].control.begin(1, Collective::Barrier));
        assert_eq!(
            failure_within(&ranks[0], QUIET),
            None,
            "the others have refused it, too, and are one further"
        );
        // The call in which the others wait is rejected as well.
        refuse(1, "again");
        let failure = failure_within(&ranks[0], Duration::from_secs(5)).expect("reported");
        assert!(failure.message.ends_with("of group \"test\": again"), "{failure}");
    }
}

#[test]
fn peers_that_wait_in_a_barrier_for_a_refused_operator_are_told() {
    // `comes`: rank 1 enters the barrier later. `had_met`: rank 1 has already passed it.
    for (comes, had_met) in [(false, false), (true, false), (false, true)] {
        let ranks = ranks();
        let enter = |rank: usize| ranks[rank].control.enter_barrier();
        if had_met {
            enter(1);
            ranks[1].control.leave_barrier(true);
        }
        ranks[1].add("not contiguous".into(), RejectedCall::Operator);
        [0, 2].into_iter().for_each(enter);
        if comes {
            enter(1);
        }
        let told = !comes && !had_met;
        let failure = failure_within(&ranks[0], if told { Duration::from_secs(5) } else { QUIET });
        let pid = std::process::id();
        let text = format!(
            "rank 1 (pid {pid}) rejected a call and has not repeated it since; ranks 0 and 2 \
             are blocked in a barrier of symmetric memory of group \"test\": not contiguous"
        );
        assert_eq!(
            failure,
            told.then(|| Error::mismatch(text)),
            "comes: {comes}, had met: {had_met}"
        );
    }
}

/// Sends a message as a group does.
fn send(rank: &LocalRejections, message: Message) {
    rank.recorder.message(true, &message, PATIENCE, CallTarget::Cpu, false);
    rank.messages.send(message, PATIENCE, Completion::new(|_, _| {})).expect("sent");
}

fn message(peer: Rank) -> Message {
    let span = Span { addr: std::ptr::dangling::<u8>() as usize, bytes: 0 };
    Message::of(MessageSpec { peer: Some(peer), tag: 7, dtype: DType::U8, span, timeout: None })
}

const PATIENCE: Duration = Duration::from_secs(5);

// proves P9
#[test]
fn a_peer_that_sleeps_for_a_refused_message_is_told() {
    // The call that rank 1 rejects, the rank for which rank 0 waits, and whether rank 0 waits
    // for that call.
    let refused = |peer, tag| RejectedCall::Message { send: true, peer, tag };
    for (refused, peer, reported) in [
        (refused(Some(Rank(0)), 7), Rank(1), true),
        (refused(Some(Rank(0)), 8), Rank(1), false),
        (refused(Some(Rank(2)), 7), Rank(1), false),
        (refused(Some(Rank(0)), 7), Rank(2), false),
        (RejectedCall::Message { send: false, peer: None, tag: 7 }, Rank(1), false),
    ] {
        let ranks = ranks();
        let first = &ranks[0].messages;
        std::thread::scope(|scope| {
            let ticket =
                first.recv(message(peer), PATIENCE, Completion::new(|_, _| {})).expect("begun");
            let waiting = scope.spawn(move || first.wait(ticket, None));
            ranks[1].add("too short".into(), refused);
            let failure = failure_within(&ranks[2], if reported { PATIENCE } else { QUIET });
            assert_eq!(failure.is_some(), reported, "{refused:?}, from {peer}");
            if let Some(failure) = failure {
                let pid = std::process::id();
                let text = format!(
                    "rank 1 (pid {pid}) rejected a call and has not repeated it since; rank 0 \
                     is blocked in recv, tag 7, of group \"test\": too short"
                );
                assert_eq!((failure.kind, failure.message), (ErrorKind::Mismatch, text));
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
    ranks[1].add("no such dtype".into(), ON_NODE);
    send(&ranks[1], message(Rank(0)));
    ranks[0].control.begin(1, Collective::AllGather);
    let failure = failure_within(&ranks[0], PATIENCE).expect("reported");
    assert!(
        failure.message.contains("rank 0 is blocked in all_gather, collective #1"),
        "{failure}"
    );
}
