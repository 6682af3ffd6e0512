//! Messages between threads that are ranks, each on its own node. Their transports reject lengths
//! that do not match.

use super::thread_wires::{data, on_ranks};
use crate::error::{Error, ErrorKind};
use crate::rank::Rank;
use std::time::{Duration, Instant};

/// Lengths: 0, eager ones up to the longest, three whose last chunk must be requested, and one that
/// has several chunks to request.
const LENGTHS: [usize; 8] = [0, 1, 977, 262_144, 262_145, 1_048_577, 1_179_648, 7_340_035];

#[test]
fn every_length_comes_as_it_was() {
    on_ranks(2, |member| {
        for (seed, bytes) in LENGTHS.into_iter().enumerate() {
            if member.me == 0 {
                member.send(1, 5, &mut data(seed, bytes));
                continue;
            }
            assert!(member.recv(0, 5, bytes) == data(seed, bytes), "{bytes} bytes");
            assert!(
                member.net.wires.lock().expect("no panic").came[&(Rank(0), Rank(1))]
                    > LENGTHS[..=seed].iter().sum(),
                "counted"
            );
        }
    });
}

#[test]
fn both_ranks_send_first() {
    on_ranks(2, |member| {
        let other = 1 - member.me;
        for bytes in LENGTHS {
            let mut own = data(member.me as usize, bytes);
            let sent = member.isend(other, 0, &mut own);
            assert!(member.recv(other, 0, bytes) == data(other as usize, bytes), "{bytes} bytes");
            assert_eq!(member.finish(sent), (Ok(()), None));
        }
        // Eager messages need no receiver.
        member.send(other, 1, &mut [member.me as u8; 600]);
        assert_eq!(member.recv(other, 1, 600), [other as u8; 600]);
    });
}

#[test]
fn rings_in_which_everybody_sends_first_go_round() {
    on_ranks(4, |member| {
        let (next, before) = ((member.me + 1) % 4, (member.me + 3) % 4);
        for round in 0..10 {
            for bytes in [8, 3_000_000] {
                let mut own = data(round + member.me as usize, bytes);
                let sent = member.isend(next, round as i32, &mut own);
                assert!(
                    member.recv(before, round as i32, bytes)
                        == data(round + before as usize, bytes)
                );
                assert_eq!(member.finish(sent), (Ok(()), None));
            }
        }
    });
}

#[test]
fn tags_may_be_received_in_any_order_and_equal_ones_keep_theirs() {
    on_ranks(2, |member| {
        let lengths = [70_000, 30, 2_000_000, 5];
        if member.me == 0 {
            let mut all: Vec<Vec<u8>> =
                (0..12).map(|number| data(number, lengths[number % 4])).collect();
            let sent: Vec<_> = all
                .iter_mut()
                .enumerate()
                .map(|(number, data)| member.isend(1, number as i32 % 4, data))
                .collect();
            sent.into_iter().for_each(|sent| assert_eq!(member.finish(sent), (Ok(()), None)));
        } else {
            for (number, tag) in [3, 2, 1, 0]
                .into_iter()
                .flat_map(|tag| [(tag, tag), (tag + 4, tag), (tag + 8, tag)])
            {
                assert!(
                    member.recv(0, tag as i32, lengths[tag]) == data(number, lengths[tag]),
                    "message {number} of tag {tag}"
                );
            }
        }
    });
}

#[test]
fn receives_from_any_rank_match_in_their_order() {
    on_ranks(3, |member| {
        if member.me > 0 {
            member.recv(0, 1, 1);
            (0..3).for_each(|number| member.send(0, 0, &mut data(number, 70_000)));
            return;
        }
        (1..3).for_each(|peer| member.send(peer, 1, &mut [0]));
        let mut last = [0; 3];
        for _ in 0..6 {
            let mut into = vec![0xee; 70_000];
            let started = member.start_any(&mut into);
            let (outcome, source) = member.finish(started);
            let source = source.expect("somebody sent").index();
            assert_eq!(outcome, Ok(()));
            assert!(
                into == data(last[source], into.len()),
                "message {} of rank {source}",
                last[source]
            );
            last[source] += 1;
        }
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
            // Messages that arrived before the connection complete all at once, on its thread.
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

#[test]
fn a_deadline_names_the_peer_and_ends_the_group() {
    on_ranks(2, |member| {
        if member.me == 1 {
            std::thread::sleep(Duration::from_millis(600));
            return;
        }
        let (begun, mut into) = (Instant::now(), [0xee; 12]);
        let started = member.start(false, 1, 9, &mut into, 0.2).expect("starts");
        let error = member.finish(started).0.expect_err("nobody comes");
        let took = begun.elapsed();
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        let text = "s in recv(12 bytes, uint8, tag 9) of group \"test\", waiting for rank 1 \
            (node \"node1\", pid 7), \
                    which has begun no message with it";
        assert!(error.message.ends_with(text), "{error}");
        assert!((200..500).contains(&took.as_millis()), "{took:?}");
        let again = member.start(true, 1, 0, &mut into, 5.0).expect_err("it has failed");
        assert_eq!(again, error);
    });
}

#[test]
fn abort_and_the_groups_failure_release_who_waits() {
    for by_failure in [false, true] {
        on_ranks(2, |member| {
            if member.me == 1 {
                std::thread::sleep(Duration::from_millis(400));
                return;
            }
            let mut into = [0; 4];
            let started = member.start(false, 1, 0, &mut into, 60.0).expect("starts");
            let begun = Instant::now();
            let error = Error::aborted("it is over");
            if by_failure {
                member.messages.control.fail(error.clone());
            } else {
                member.messages.close(&error);
            }
            assert_eq!(member.finish(started).0, Err(error));
            assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
        });
    }
}

#[test]
fn who_leaves_has_been_read_and_who_needs_it_then_hears_of_it() {
    on_ranks(2, |member| {
        if member.me == 0 {
            (0..20).for_each(|number| member.send(1, 0, &mut data(number, 1000 * number)));
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
        (0..20).for_each(|number| {
            assert!(member.recv(0, 0, 1000 * number) == data(number, 1000 * number))
        });
        let mut into = [0; 4];
        let started = member.start(false, 0, 0, &mut into, 60.0).expect("starts");
        let error = member.finish(started).0.expect_err("nobody is there");
        assert_eq!(error.kind, ErrorKind::Peer, "{error}");
        assert!(
            error.message.contains("lost its connection to rank 0 (node \"node0\", pid 7)"),
            "{error}"
        );
    });
}
