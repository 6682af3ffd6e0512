//! Agreement of the two ends of a long message on whether it is direct. Neither end waits.
//!
//! The end that launches first decides (`docs/design/copy-engine.md`). In a direct message it
//! publishes the offset of its tensor, and the other end moves the bytes. The ends decide as the
//! ranks of a collective do ([`super::copy_mode`]), but for each pair of ranks and direction.

use super::copy_mode::DECISION_WAIT;
use super::launch_log::{self, MESSAGE_RECORDS, MessageLaunch};
use crate::control::ControlBlock;
use crate::error::Result;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

/// An end that is more than this many messages ahead of the other one neither reads nor writes the
/// slot of its message, because the other end may still need it for an earlier message.
const NEAR: u64 = 8;
const _: () = assert!(2 * NEAR as usize <= MESSAGE_RECORDS);

/// The decision about a message, as one end sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageMode {
    /// A kernel moves the message.
    Kernel,
    /// The message is direct, and this end launched it first: the other end moves the bytes.
    First,
    /// The message is direct, and this end launched it later; the other end's tensor is at this
    /// offset.
    Later(u64),
}

/// Decides `message`, which this end has recorded. `offset` is that of this end's tensor, if it
/// wants a direct message. If an end may have taken the kernel because it was far ahead, so does
/// the other one.
///
/// Fails the group if the lengths differ, which the records no longer show if the other end has
/// launched many messages since.
pub fn decide(
    control: &ControlBlock,
    message: &MessageLaunch,
    offset: Option<u64>,
) -> Result<MessageMode> {
    let number = message.number;
    // Pairs with the fence of the other end: if that launched this message far ahead of this end,
    // it has published the number, and this end sees it.
    fence(Ordering::SeqCst);
    let launched = launch_log::launched_by_other_end(control, message);
    if launched + NEAR < number {
        return Ok(MessageMode::Kernel);
    }
    let slot = launch_log::message_slot(control, message);
    let (mine, theirs) = (usize::from(message.send), usize::from(!message.send));
    slot.offset[mine].store(offset.unwrap_or(u64::MAX), Ordering::Relaxed);
    slot.bytes[mine].store(message.bytes, Ordering::Relaxed);
    let direct = offset.is_some() && launched < number;
    // The other end has just recorded this message, and is usually about to decide.
    let since = Instant::now();
    while launched == number
        && slot.word.load(Ordering::Acquire) / 2 != number
        && since.elapsed() < DECISION_WAIT
    {
        std::hint::spin_loop();
    }
    let mut seen = slot.word.load(Ordering::Acquire);
    while seen / 2 != number {
        let word = 2 * number + u64::from(direct);
        match slot.word.compare_exchange(seen, word, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) if direct => return Ok(MessageMode::First),
            Ok(_) => return Ok(MessageMode::Kernel),
            Err(now) => seen = now,
        }
    }
    let found = slot.bytes[theirs].load(Ordering::Relaxed);
    if found != message.bytes {
        return Err(launch_log::lengths_differ(control, message, found));
    }
    Ok(match seen % 2 {
        0 => MessageMode::Kernel,
        _ => MessageMode::Later(slot.offset[theirs].load(Ordering::Relaxed)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::tests::controls;
    use crate::error::ErrorKind;
    use crate::rank::Rank;

    /// Launches message `number` of rank 0 to rank 1 at the end of `control`, which may want a
    /// `direct` one.
    fn launch(control: &ControlBlock, number: u64, direct: bool) -> MessageMode {
        let message = launch_log::tests::end(control.rank() == Rank(0), number, 64);
        launch_log::compare_transfer(control, message).expect("both ends launch the same");
        let offset = direct.then(|| offset(control.rank(), number));
        decide(control, &message, offset).expect("the lengths are equal")
    }

    fn offset(rank: Rank, number: u64) -> u64 {
        1000 * number + u64::from(rank.0)
    }

    #[test]
    fn the_first_end_decides_and_the_other_one_knows_its_tensor() {
        let controls = controls(2);
        for number in 1..=100 {
            let (first, later) =
                if number % 3 == 0 { (Rank(0), Rank(1)) } else { (Rank(1), Rank(0)) };
            let direct = number % 2 == 0;
            let found = [(first, direct), (later, !direct)]
                .map(|(rank, wanted)| launch(&controls[rank.index()], number, wanted));
            let expected = match direct {
                true => [MessageMode::First, MessageMode::Later(offset(first, number))],
                false => [MessageMode::Kernel; 2],
            };
            assert_eq!(found, expected, "message {number}");
        }
    }

    #[test]
    fn ends_far_apart_take_the_kernel() {
        let controls = controls(2);
        let run = |control: &ControlBlock| -> Vec<MessageMode> {
            (1..=60).map(|number| launch(control, number, true)).collect()
        };
        let (ahead, behind) = (run(&controls[0]), run(&controls[1]));
        for (index, modes) in ahead.into_iter().zip(behind).enumerate() {
            let number = index as u64 + 1;
            let expected = match number <= NEAR {
                true => (MessageMode::First, MessageMode::Later(offset(Rank(0), number))),
                false => (MessageMode::Kernel, MessageMode::Kernel),
            };
            assert_eq!(modes, expected, "message {number}");
        }
    }

    #[test]
    fn lengths_are_compared_although_the_record_is_gone() {
        let controls = controls(2);
        for number in 1..=MESSAGE_RECORDS as u64 + 1 {
            launch(&controls[1], number, true);
        }
        let sent = launch_log::tests::end(true, 1, 128);
        launch_log::compare_transfer(&controls[0], sent).expect("the record is gone");
        let error = decide(&controls[0], &sent, None).expect_err("64 bytes are expected");
        error.assert_says(ErrorKind::Mismatch, &["sends 128 bytes", "expects 64", "message #1"]);
    }

    #[test]
    fn ends_that_launch_at_the_same_time_decide_alike() {
        for round in 0..60u64 {
            let controls = controls(2);
            let decided: Vec<Vec<MessageMode>> =
                launch_log::tests::at_the_same_time(&controls, round, |control, number, dice| {
                    launch(control, number, dice % 2 == 0)
                });
            for (index, modes) in decided[0].iter().zip(&decided[1]).enumerate() {
                // Exactly one end of a direct message moves its bytes.
                let number = index as u64 + 1;
                let right = match modes {
                    (MessageMode::Kernel, other) => *other == MessageMode::Kernel,
                    (MessageMode::First, other) => {
                        *other == MessageMode::Later(offset(Rank(0), number))
                    }
                    (MessageMode::Later(at), other) => {
                        (*at, *other) == (offset(Rank(1), number), MessageMode::First)
                    }
                };
                assert!(right, "round {round}, message {number}: {modes:?}");
            }
        }
    }
}
