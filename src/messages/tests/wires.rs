//! Messages between threads that are ranks, each on its own node. Their transports reject lengths
//! that do not match.

use super::thread_wires::{data, on_ranks};
use crate::error::ErrorKind;
use crate::rank::Rank;
use std::time::Duration;

/// Lengths: 0, eager ones up to the longest, three whose last chunk must be requested, and one that
/// has several chunks to request.
const LENGTHS: [usize; 8] = [0, 1, 977, 262_144, 262_145, 1_048_577, 1_179_648, 7_340_035];

#[test]
fn every_length_comes_as_it_was_and_both_ranks_may_send_first() {
    on_ranks(2, |member| {
        let (me, other) = (Rank(member.me), 1 - member.me);
        for (at, bytes) in LENGTHS.into_iter().enumerate() {
            let mut own = data(member.me as usize, bytes);
            let sent = member.isend(other, 5, &mut own);
            assert!(member.recv(other, 5, bytes) == data(other as usize, bytes), "{bytes} bytes");
            assert_eq!(member.finish(sent), (Ok(()), None));
            assert!(
                member.net.wires.lock().expect("no panic").came[&(Rank(other), me)]
                    > LENGTHS[..=at].iter().sum(),
                "counted"
            );
        }
        // Eager messages need no receiver.
        member.send(other, 1, &mut [member.me as u8; 600]);
        assert_eq!(member.recv(other, 1, 600), [other as u8; 600]);
    });
}

#[test]
fn a_flood_that_nobody_receives_yet_is_held_back_and_comes_later() {
    on_ranks(2, |member| {
        const COUNT: usize = 200;
        if member.me == 0 {
            let mut all: Vec<Vec<u8>> = (0..COUNT).map(|number| data(number, 60_000)).collect();
            let sent: Vec<_> = all.iter_mut().map(|data| member.isend(1, 0, data)).collect();
            let mut word = [0];
            member.send(1, 1, &mut word);
            // Sends that precede the connection complete all at once, on the connection's thread.
            let unfinished = || member.messages.lock().open.len();
            while unfinished() == COUNT {
                std::thread::sleep(Duration::from_millis(1));
            }
            let open = unfinished();
            assert!(
                (100..COUNT).contains(&open),
                "{open} wait for a receive: 4 MiB are on their way"
            );
            member.send(1, 2, &mut word);
            sent.into_iter().for_each(|sent| assert_eq!(member.finish(sent), (Ok(()), None)));
        } else {
            member.recv(0, 1, 1);
            member.recv(0, 2, 1);
            (0..COUNT).for_each(|number| {
                assert!(member.recv(0, 0, 60_000) == data(number, 60_000), "message {number}")
            });
        }
    });
}

#[test]
fn long_messages_that_nobody_receives_yet_come_unasked_as_far_as_there_is_room() {
    on_ranks(2, |member| {
        let length = |number: usize| 700_000 + number;
        if member.me == 0 {
            let mut all: Vec<Vec<u8>> =
                (0..20).map(|number| data(number, length(number))).collect();
            let sent: Vec<_> = all.iter_mut().map(|data| member.isend(1, 0, data)).collect();
            member.send(1, 1, &mut [0]);
            assert_eq!(member.recv(1, 2, 1), [7]);
            // All sends are still open, because their last chunks must be requested.
            assert_eq!(member.messages.lock().open.len(), sent.len());
            member.send(1, 3, &mut [0]);
            sent.into_iter().for_each(|sent| assert_eq!(member.finish(sent), (Ok(()), None)));
        } else {
            member.recv(0, 1, 1);
            member.send(0, 2, &mut [7]);
            member.recv(0, 3, 1);
            (0..20).for_each(|number| {
                assert!(
                    member.recv(0, 0, length(number)) == data(number, length(number)),
                    "message {number}"
                )
            });
        }
    });
}

#[test]
fn lengths_that_differ_are_an_error_at_the_receiver() {
    for bytes in [4, 5000, 3_000_000] {
        on_ranks(2, |member| {
            if member.me == 0 {
                let mut own = data(0, bytes);
                let sent = member.isend(1, 3, &mut own);
                let (outcome, _) = member.finish(sent);
                // An eager send ends before the receiver finds the mismatch.
                assert!(
                    if bytes > 262_144 { outcome.is_err() } else { outcome.is_ok() },
                    "{outcome:?}"
                );
            } else {
                let mut into = vec![0xee; bytes + 4];
                let started = member.start(false, 0, 3, &mut into, 60.0).expect("starts");
                let error = member.finish(started).0.expect_err("they differ");
                assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
                let text = format!(
                    "rank 0 (node \"node0\", pid 7) sent {bytes} bytes (uint8, tag 3) to rank 1 \
                     (node \"node1\", pid 7) in group \"test\", \
                     whose recv expects {} (uint8)",
                    bytes + 4
                );
                assert_eq!(error.message, text);
                assert!(into.iter().all(|&byte| byte == 0xee), "nothing was written");
                assert_eq!(member.messages.health.failure(), Some(error), "the group has failed");
            }
        });
    }
}
