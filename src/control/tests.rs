//! Tests of messages about late ranks.
#![allow(unsafe_code, reason = "words at offsets of shared memory")]

use super::*;

use crate::error::ErrorKind;
use crate::mem::layout::SegmentLayout;
use crate::mem::shm::ShmSegment;
use crate::op::Collective;
use crate::rank::Rank;
use crate::sync::timeout::CallTimeout;
use crate::sys::process;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Makes the control blocks of a group of `n` ranks, all in this process.
pub(crate) fn controls(n: u32) -> Vec<ControlBlock> {
    controls_of(&vec![std::process::id(); n as usize])
}

/// Makes the control blocks of a group whose ranks are the processes `pids`.
fn controls_of(pids: &[u32]) -> Vec<ControlBlock> {
    let bytes = SegmentLayout::new(pids.len()).total_bytes();
    let file = ShmSegment::create(bytes).expect("memfd");
    let control = |rank| {
        let segment = ShmSegment::map(file.try_clone().expect("dup"), bytes).expect("map");
        let members = (0..).zip(pids).map(|(global, &pid)| Identity { pid, global }).collect();
        ControlBlock::new(segment, Rank(rank), "test".into(), members, 1)
    };
    (0..pids.len() as u32).map(control).collect()
}

/// Returns how often the bell of `rank` was rung.
pub(crate) fn rung(control: &ControlBlock, rank: Rank) -> u32 {
    control.words(rank).bell.0.rung()
}

/// Makes the control block of rank 0 in a group whose other ranks are the processes `pids`.
fn control(pids: &[u32]) -> ControlBlock {
    controls_of(&[&[std::process::id()], pids].concat()).swap_remove(0)
}

fn stands(control: &ControlBlock, rank: u32, doing: CurrentCall) {
    control.words(Rank(rank)).doing.store(doing.word(), Ordering::Relaxed);
}

#[test]
fn a_timeout_says_what_each_missing_rank_is_doing() {
    let mut sleeper = std::process::Command::new("sleep").arg("60").spawn().expect("sleep runs");
    let pid = sleeper.id();
    // SAFETY: a child of this process that has not been reaped.
    assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGSTOP) }, 0);
    let until = std::time::Instant::now() + Duration::from_secs(10);
    while process::state(pid) != Some("alive, stopped (T)") {
        assert!(std::time::Instant::now() < until, "{:?}", process::state(pid));
        std::thread::sleep(Duration::from_millis(1));
    }
    let control = control(&[pid, pid, pid, u32::MAX]);
    stands(
        &control,
        1,
        CurrentCall { number: 1041, op: Collective::AllGather, progress: CallProgress::Running },
    );
    stands(
        &control,
        2,
        CurrentCall { number: 1041, op: Collective::AllGather, progress: CallProgress::Finished },
    );
    stands(
        &control,
        4,
        CurrentCall { number: 7, op: Collective::Barrier, progress: CallProgress::Finished },
    );
    let late = control.late_ranks(&|rank| rank != Rank(0));
    sleeper.kill().expect("killed");
    sleeper.wait().expect("reaped");
    let expected = format!(
        "ranks 1, 2, 3 and 4 (\
         rank 1: pid {pid} alive, stopped (T), in all_gather #1041; \
         rank 2: pid {pid} alive, stopped (T), finished all_gather #1041 and began nothing since; \
         rank 3: pid {pid} alive, stopped (T), has begun no collective; \
         rank 4: pid {} exited, finished barrier #7 and began nothing since)",
        u32::MAX
    );
    assert_eq!(late, expected);
}

#[test]
fn where_a_rank_stands_survives_its_word() {
    assert_eq!(CurrentCall::of(0), None);
    for &op in Collective::ALL {
        for progress in CallProgress::ALL {
            let doing = CurrentCall { number: 1 << 50, op, progress };
            assert_eq!(CurrentCall::of(doing.word()), Some(doing));
        }
    }
    assert_eq!(CurrentCall::of(1 << 8 | 62 << 2), None, "no such collective");
    assert_eq!(CurrentCall::of(1 << 8 | 3), None, "no such progress");
}

#[test]
fn a_group_warns_once_for_all_its_calls() {
    let control = control(&[std::process::id()]);
    assert!(!control.warned.load(Ordering::Relaxed));
    for _ in 0..2 {
        let limit = CallTimeout::from_first_wait(Duration::from_millis(600));
        control.wait_alone(&limit, &|| "a test".into(), |_| true).expect_err("late");
        assert!(control.warned.load(Ordering::Relaxed));
    }
}

#[test]
fn who_leaves_may_say_because_of_what() {
    for (farewell, expected) in [
        ("", "left the group (destroy_process_group or exit)"),
        ("KeyError: 'x'", "left the group after KeyError: 'x'"),
    ] {
        let controls = controls(2);
        assert_eq!(controls[0].exit_reason(Rank(1)), None);
        controls[1].note_departure(farewell);
        assert_eq!(controls[0].exit_reason(Rank(1)).as_deref(), Some(expected));
    }
}

#[test]
fn a_process_that_leaves_with_an_exception_is_named_once_it_has_ended() {
    let expected = Some("left the group after KeyError: 'x'".to_owned());
    let [own, ended, lives] =
        <[_; 3]>::try_from(controls_of(&[std::process::id(), 7, 8])).expect("three");
    ended.note_departure("KeyError: 'x'");
    lives.note_departure("KeyError: 'x'");
    // A call that would not ask again, such as the launch of a kernel, fails at once.
    assert_eq!(own.exit_reason(Rank(2)), expected);
    assert_eq!(
        (own.exit_reason_of_awaited(Rank(1), false), own.exit_reason_of_awaited(Rank(2), false)),
        (None, None)
    );
    // A wait that reaches its timeout names the reason, too, and so does a rank that leaves.
    let over = CallTimeout::from_first_wait(Duration::ZERO);
    let error = own.trouble(&over, &|| "a test".into(), &|rank| rank == Rank(2)).expect("over");
    error.assert_says(ErrorKind::Peer, &["rank 2 (pid 8) left the group after KeyError"]);
    assert!(own.about_to_end().is_some_and(|error| error.message.starts_with("rank 1 (pid 7)")));
    own.note_exit(Rank(1), "has ended (exited with code 1)".into());
    assert_eq!(
        (own.exit_reason_of_awaited(Rank(1), false), own.exit_reason_of_awaited(Rank(2), false)),
        (expected.clone(), None)
    );
    let given_up = Instant::now() + Duration::from_secs(30);
    while own.exit_reason_of_awaited(Rank(2), false).is_none() && Instant::now() < given_up {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(own.exit_reason_of_awaited(Rank(2), false), expected);
}

#[test]
fn what_a_rank_does_includes_messages() {
    let controls = controls(3);
    let activity = || controls[0].activity(Rank(1));
    let waits = |send| {
        controls[1].await_message(Some(AwaitedMessage { send, peer: Rank(2), tag: -1 }));
    };
    assert_eq!(activity(), "has begun no collective");
    waits(false);
    assert_eq!(activity(), "in recv from rank 2 (tag -1)");
    let call = |progress| CurrentCall { number: 4, op: Collective::AllReduce, progress };
    controls[1].set_current_call(call(CallProgress::Finished));
    waits(true);
    assert_eq!(activity(), "finished all_reduce #4, in send to rank 2 (tag -1)");
    controls[1].set_current_call(call(CallProgress::Running));
    assert_eq!(activity(), "in all_reduce #4");
    controls[1].set_current_call(call(CallProgress::Finished));
    controls[1].await_message(None);
    assert_eq!(activity(), "finished all_reduce #4 and began nothing since");
}

#[test]
fn p3_of_several_who_have_died_the_first_is_named() {
    let control = control(&[7, 8]);
    control.note_exit(Rank(2), "has ended (killed by signal 9 (SIGKILL))".into());
    control.note_exit(Rank(1), "has ended (killed by signal 15 (SIGTERM))".into());
    let limit = CallTimeout::from_first_wait(Duration::from_secs(60));
    let error =
        control.check(&limit, &|| "a test".into(), &|_| true).expect_err("both are missing");
    assert!(error.message.starts_with("rank 2 (pid 8) has ended (killed by signal 9"), "{error}");
    assert!(control.dead().expect("both have died").message.starts_with("rank 2 (pid 8)"));
    let control = self::control(&[7, 8]);
    control.note_exit(Rank(2), "has ended".into());
    control.note_exit(Rank(1), "has ended".into());
    let error = control
        .check(&limit, &|| "a test".into(), &|rank| rank == Rank(1))
        .expect_err("rank 1 is missing");
    assert!(
        error.message.starts_with("rank 1 (pid 7) has ended"),
        "rank 2 has given what this waits for: {error}"
    );
}

/// Node "b" with these ranks of a group of 4.
fn part(ranks: &[u32]) -> ParentGroup {
    let ranks = ranks.iter().map(|&rank| Rank(rank)).collect();
    ParentGroup { node: "b".into(), ranks, global_ranks: vec![0, 1, 2, 3] }
}

#[test]
fn a_part_of_a_larger_group_names_members_as_that_does() {
    let other = control(&[7]);
    let control = control(&[u32::MAX]).named(Some(part(&[2, 3])));
    let pid = std::process::id();
    assert_eq!(control.describe(Rank(0)), format!("rank 2 (node \"b\", pid {pid})"));
    assert_eq!(control.display_rank(Rank(1)), Rank(3));
    let late = control.late_ranks(&|rank| rank != Rank(0));
    assert_eq!(late, format!("rank 3 (rank 3: pid {} exited, has begun no collective)", u32::MAX));
    for (progress, text) in [
        (CallProgress::Running, "in a collective"),
        (CallProgress::Finished, "in no collective"),
        (CallProgress::WaitsForNodes, "waits for other nodes"),
    ] {
        stands(&control, 1, CurrentCall { number: 3, op: Collective::AllGather, progress });
        let late = control.late_ranks(&|rank| rank != Rank(0));
        assert_eq!(late, format!("rank 3 (rank 3: pid {} exited, {text})", u32::MAX));
    }
    control.note_exit(Rank(1), "has ended (gone)".into());
    let dead = control.dead().expect("it has ended");
    assert_eq!(
        dead.message,
        format!("rank 3 (node \"b\", pid {}) of group \"test\" has ended (gone)", u32::MAX)
    );
    let plain = other.named(Some(part(&[2])));
    assert_eq!(plain.describe(Rank(1)), "rank 1 (pid 7)", "lengths that do not fit are no part");
}
