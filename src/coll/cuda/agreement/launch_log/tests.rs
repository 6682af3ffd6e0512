use super::*;
use crate::control;
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::sync::call_site::CallSite;

fn controls() -> [ControlBlock; 2] {
    control::tests::controls(2).try_into().expect("two")
}

/// An all_reduce of float32 sums on tensors of `bytes` bytes.
pub(crate) fn sum(bytes: usize) -> CallSpec<'static> {
    let spans = vec![Span { addr: 0, bytes }];
    let (inputs, outputs) = (spans.clone().into(), spans.into());
    let (op, dtype) = (Collective::AllReduce, DType::F32);
    CallSpec { op, dtype, inputs, outputs, ..CallSpec::barrier(None) }
}

/// Makes the launches 1 to 300 on each of `controls`, all ranks at the same time and with random
/// pauses; returns what `launch` returns. It gets a rank, a launch and a random number.
pub(crate) fn at_the_same_time<T: Send>(
    controls: &[ControlBlock],
    round: u64,
    launch: impl Fn(&ControlBlock, u64, u64) -> T + Sync,
) -> Vec<Vec<T>> {
    let run = |control: &ControlBlock| {
        let mut dice =
            (1000 * round + u64::from(control.rank().0) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let one = |number| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            (0..dice % 400).for_each(|_| std::hint::spin_loop());
            if dice.is_multiple_of(61) {
                std::thread::yield_now();
            }
            launch(control, number, dice)
        };
        (1..=300).map(one).collect()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            controls.iter().map(|control| scope.spawn(move || run(control))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// The launch of rank 0's send to rank 1, or of rank 1's receive.
pub(crate) fn end(send: bool, number: u64, bytes: u64) -> MessageLaunch {
    let peer = Rank(u32::from(send));
    MessageLaunch { send, peer, number, bytes, channel: Channel::Transfers }
}

#[test]
fn ranks_that_disagree_on_recording_hear_of_it() {
    let [one, two] = controls();
    compare(&one, 1, &sum(4), Channel::CapturedCollectives).expect("alone so far");
    let error = compare(&two, 1, &sum(4), Channel::Collectives).expect_err("on another channel");
    error.assert_says(ErrorKind::Mismatch, &["to run at once", "to be recorded into a graph"]);
    assert_eq!(one.failure().map(|failure| failure.kind), Some(ErrorKind::Mismatch));
}

#[test]
fn ranks_that_call_from_different_lines_hear_of_it_if_they_ask() {
    let at = |text: &str| CallSpec { call_site: CallSite::known(CallSite::number(text)), ..sum(4) };
    let disagree = |first: CallSpec, second: CallSpec| {
        let [one, two] = controls();
        compare(&one, 1, &first, Channel::Collectives).expect("alone so far");
        compare(&two, 1, &second, Channel::Collectives).map_err(|error| error.message)
    };
    disagree(at("a.py:1"), at("a.py:1")).expect("the same line");
    let text = disagree(at("a.py:1"), at("a.py:2")).expect_err("other lines");
    assert!(
        text.contains("SUM) at a.py:1 ")
            && text.contains("SUM) at a.py:2 ")
            && text.ends_with("\"test\""),
        "{text}"
    );
    let text = disagree(sum(4), at("a.py:2")).expect_err("one asks");
    assert!(text.contains("one of them was started with SYMM_DEBUG=call_site"), "{text}");
}

#[test]
fn what_a_rank_launched_last_is_known() {
    let [one, two] = controls();
    assert_eq!(last(&two, Rank(0)), None);
    compare(&one, 1, &sum(4), Channel::Collectives).expect("alone so far");
    compare(&one, 2, &sum(8), Channel::Collectives).expect("alone so far");
    assert_eq!(last(&two, Rank(0)), Some(Description::of(&sum(8))));
}

#[test]
fn p3_a_death_that_kernels_wait_through_says_how_far_both_ranks_had_come() {
    let [one, two] = controls();
    compare(&one, 1, &sum(4), Channel::Collectives).expect("alone so far");
    compare(&two, 1, &sum(4), Channel::Collectives).expect("the same");
    compare(&one, 2, &sum(8), Channel::Collectives).expect("alone so far");
    one.note_exit(Rank(1), "has ended (killed by signal 9 (SIGKILL))".into());
    assert_eq!(one.failure(), None, "no kernel waits");
    one.set_kernel_progress(progress);
    let error = one.failure().expect("told at once");
    assert_eq!(error.kind, ErrorKind::Peer);
    for part in [
        "rank 1 (pid ",
        "SIGKILL)), 1 CUDA collectives launched, the last all_reduce",
        "is alive, 2 CUDA collectives launched, the last all_reduce",
    ] {
        assert!(error.message.contains(part), "{error}");
    }
}

// proves P7
#[test]
fn both_ends_of_a_message_are_compared_whoever_comes_first() {
    for sender_first in [true, false] {
        let [one, two] = controls();
        for number in 1..=40 {
            compare_transfer(&one, end(true, number, number * 8))
                .expect("the other end has not come");
            compare_transfer(&two, end(false, number, number * 8)).expect("the same length");
        }
        let error = if sender_first {
            compare_transfer(&one, end(true, 41, 8)).expect("the other end has not come");
            compare_transfer(&two, end(false, 41, 12)).expect_err("another length")
        } else {
            compare_transfer(&two, end(false, 41, 12)).expect("the other end has not come");
            compare_transfer(&one, end(true, 41, 8)).expect_err("another length")
        };
        error.assert_says(
            ErrorKind::Mismatch,
            &["sends 8 bytes", "expects 12, as CUDA message #41"],
        );
    }
}

// proves P7
#[test]
fn ends_of_a_message_that_disagree_on_recording_are_told() {
    let [one, two] = controls();
    compare_transfer(&one, end(true, 1, 8)).expect("alone so far");
    let recorded = MessageLaunch { channel: Channel::CapturedTransfers, ..end(false, 1, 8) };
    let error = compare_transfer(&two, recorded).expect_err("on another channel");
    let sends = "sends CUDA message #1 between them in group \"test\" to run at once";
    let receives = "receives it to be recorded into a graph";
    error.assert_says(ErrorKind::Mismatch, &["rank 0 ", sends, "rank 1 ", receives]);
}

#[test]
fn a_sender_far_ahead_is_not_compared() {
    let [one, two] = controls();
    (1..=100).for_each(|number| {
        compare_transfer(&one, end(true, number, number)).expect("alone so far")
    });
    compare_transfer(&two, end(false, 1, 9)).expect("what stood there is gone");
    compare_transfer(&two, end(false, 100, 9)).expect_err("another length");
}

#[test]
fn a_rank_that_leaves_what_others_have_launched_fails_the_group() {
    let [one, two] = controls();
    compare(&one, 1, &sum(4), Channel::Collectives).expect("alone so far");
    compare(&two, 1, &sum(4), Channel::Collectives).expect("the same");
    compare(&one, 2, &sum(8), Channel::Collectives).expect("alone so far");
    two.note_departure("");
    abandon(&two);
    let error = one.failure().expect("rank 0 waits in vain");
    error.assert_says(ErrorKind::Peer, &["rank 1", "after 1 CUDA collectives"]);
}

#[test]
fn a_launch_without_a_rank_that_has_left_is_refused() {
    let [one, two] = controls();
    compare(&two, 1, &sum(4), Channel::Collectives).expect("alone so far");
    two.note_departure("");
    abandon(&two);
    compare(&one, 1, &sum(4), Channel::Collectives).expect("it launched that before it left");
    let error = compare(&one, 2, &sum(4), Channel::Collectives).expect_err("it never will");
    error.assert_says(ErrorKind::Peer, &["left the group", "#2"]);
}

#[test]
fn a_rank_that_leaves_when_all_is_launched_fails_nothing() {
    let [one, two] = controls();
    compare(&one, 1, &sum(4), Channel::Collectives).expect("alone so far");
    compare(&two, 1, &sum(4), Channel::Collectives).expect("the same");
    one.note_departure("");
    abandon(&one);
    assert_eq!(two.failure(), None);
}
