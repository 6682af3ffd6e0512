//! Collectives on several nodes. Groups of threads stand for the nodes, and the rails between them
//! reject lengths that do not match.

mod thread_rail;

use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::two_level::tests::ranks::layout;
use crate::coll::two_level::tests::{
    Example, all_to_all, blank, data, movements, reductions, spans, two_level,
};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;
use crate::rank::Rank;
use crate::sync::call_site::CallSite;
use std::time::{Duration, Instant};
use thread_rail::{on_nodes, on_nodes_until};

fn call(
    op: Collective,
    dtype: DType,
    root: usize,
    inputs: &mut [Vec<u8>],
    outputs: &mut [Vec<u8>],
) -> Call<'static> {
    let (inputs, outputs) = (spans(inputs).into(), spans(outputs).into());
    let root = Rank(root as u32);
    Call::inner(CallSpec { op, dtype, root, inputs, outputs, ..CallSpec::barrier(None) })
}

const LAYOUTS: [&[u8]; 6] =
    [&[0, 0, 1, 1], &[0, 0, 0, 1], &[0, 1], &[0, 0, 1, 1, 1, 2], &[0, 1, 0, 2, 1, 2], &[0, 1, 2]];

/// Runs `example` as `rank` of `group`, and compares the outputs of this rank.
fn check(group: &Group, rank: usize, dtype: DType, example: &Example, about: &str) {
    let (mut given, wanted) = (example.given[rank].clone(), &example.wanted[rank]);
    let (mut outputs, name) = (blank(wanted), example.op.name());
    group
        .run(&[call(example.op, dtype, example.root, &mut given, &mut outputs)], None)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(outputs == *wanted, "{name} of {about}, rank {rank}");
}

#[test]
fn reductions_have_the_bits_of_two_levels_and_movements_all_bytes() {
    for nodes in LAYOUTS {
        let (layout, n) = (layout(nodes), nodes.len());
        // Lengths: no data, data in slots, over all rails, and in several turns.
        // `two_level/tests.rs` carries out programs of every length.
        let reduced = [0, 34, 4040, 4042, 65_538, 1_700_002].map(|bytes| {
            let definition =
                |inputs: &[Vec<u8>]| two_level(ReduceOp::Sum, DType::BF16, &layout, inputs);
            (bytes, reductions(n, bytes, definition))
        });
        let moved = [0, 999, 2016, 2017, 70_001].map(|bytes| (bytes, movements(n, bytes)));
        // Lengths in slots, over one rail, over all rails, and in several turns; also in place.
        let even = [0, 40, 16_385, 300_001].map(|bytes| (bytes, all_to_all(n, |_, _| bytes)));
        // Only the message from the last rank to the first is longer.
        let uneven = all_to_all(n, |from, to| if (from, to) == (n - 1, 0) { 90_000 } else { 3 });
        on_nodes(nodes, |group, rank| {
            for (bytes, examples) in &reduced {
                for example in examples {
                    check(
                        group,
                        rank,
                        DType::BF16,
                        example,
                        &format!("{bytes} bytes on {nodes:?}"),
                    );
                }
            }
            for (bytes, examples) in &moved {
                for example in examples {
                    check(group, rank, DType::U8, example, &format!("{bytes} bytes on {nodes:?}"));
                }
            }
            for (bytes, example) in &even {
                check(group, rank, DType::U8, example, &format!("{bytes} bytes each on {nodes:?}"));
                let mut buffers = example.given[rank].clone();
                let same = spans(&mut buffers);
                let in_place = Call::inner(CallSpec {
                    op: Collective::AllToAll,
                    inputs: same.clone().into(),
                    outputs: same.into(),
                    ..CallSpec::barrier(None)
                });
                group.run(&[in_place], None).expect("all_to_all in place");
                assert!(
                    buffers == example.wanted[rank],
                    "{bytes} bytes each in place on {nodes:?}, rank {rank}"
                );
            }
            check(group, rank, DType::U8, &uneven, &format!("unequal lengths on {nodes:?}"));
            // Each rank has one length for all, and the length of the last rank differs.
            let bytes = if rank == n - 1 { 8 } else { 16 };
            let (mut give, mut take) = (vec![vec![1; bytes]; n], vec![vec![0xee; bytes]; n]);
            let error = group
                .run(&[call(Collective::AllToAll, DType::U8, 0, &mut give, &mut take)], None)
                .expect_err("they disagree");
            error.assert_says(ErrorKind::Mismatch, &["bytes to rank"]);
            assert!(take.iter().flatten().all(|&byte| byte == 0xee), "nothing was written");
        });
    }
}

#[test]
fn a_rail_that_stops_within_a_call_is_a_timeout_everywhere() {
    for (most, nodes) in [(3, LAYOUTS[0]), (2, LAYOUTS[1]), (4, LAYOUTS[3])] {
        // A rank that starts late must not hear that another has already left.
        let all_have_failed = std::sync::Barrier::new(nodes.len());
        on_nodes_until(most, nodes, |group, rank| {
            let n = nodes.len();
            let (mut input, mut output) = ([data(rank, 3_000_000)], [vec![0xee; 3_000_000]]);
            let begun = Instant::now();
            let run = |call: Call<'_>| group.run(&[call], Some(Duration::from_millis(400)));
            let first = run(call(Collective::AllReduce, DType::F32, 0, &mut input, &mut output));
            let took = begun.elapsed();
            let second = run(Call::barrier(None));
            all_have_failed.wait();
            let error = first.expect_err("it stops");
            // Either a rail timed out or, perhaps a moment later, a rank that waited within its
            // node for the rail.
            error.assert_says(ErrorKind::Timeout, &["reached its timeout after"]);
            assert!(took < Duration::from_secs(10), "rank {rank} of {n}");
            assert_eq!(second.expect_err("it has failed"), error);
        });
    }
}

#[test]
fn a_call_that_reaches_its_rail_too_late_waits_for_reports_of_other_nodes() {
    let ended = std::sync::Barrier::new(2);
    on_nodes(&[0, 1], |group, rank| {
        if rank == 0 {
            // Without a peer on its node, a call without time fails first at its rail.
            let begun = Instant::now();
            let error = group.run(&[Call::barrier(None)], Some(Duration::ZERO));
            let took = begun.elapsed();
            error
                .expect_err("it has no time")
                .assert_says(ErrorKind::Timeout, &["reached its timeout after"]);
            assert!(took >= Duration::from_millis(80), "{took:?}");
        }
        ended.wait();
    });
}

#[test]
fn a_rank_that_waits_on_its_rail_sees_a_failure_on_its_own_node() {
    on_nodes_until(1, &[0, 0, 1, 1], |group, rank| {
        std::thread::scope(|scope| {
            if rank == 1 {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    // This fails the group only within the node: the rails stay as they are.
                    group.control().fail(Error::aborted("rank 1 aborted group \"test\""));
                });
            }
            let begun = Instant::now();
            let error = (0..2)
                .find_map(|_| group.run(&[Call::barrier(None)], None).err())
                .expect("the second does not end");
            assert!(error.message.contains("aborted group \"test\""), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(20), "rank {rank}");
        });
    });
}

#[test]
fn slots_have_room_for_data_and_call_sites() {
    on_nodes(&[0, 0, 1], |group, _| {
        // Lengths around the maximum length of short data, with and without a call site.
        for bytes in [0, 3911, 3912, 3913, 4040, 4041] {
            for site in ["", "train.py:12", &"train.py".repeat(40)] {
                let (mut input, mut output) = ([vec![1; bytes]], [vec![0xee; bytes]]);
                let sum = CallSpec {
                    op: Collective::AllReduce,
                    inputs: spans(&mut input).into(),
                    outputs: spans(&mut output).into(),
                    call_site: CallSite::known(CallSite::number(site)).filter(|_| !site.is_empty()),
                    ..CallSpec::barrier(None)
                };
                group.run(&[Call::inner(sum)], None).expect("all agree");
                assert!(output[0].iter().all(|&byte| byte == 3), "{bytes} bytes at {site:?}");
            }
        }
    });
}

#[test]
fn ranks_that_disagree_get_a_mismatch_on_all_nodes() {
    for nodes in LAYOUTS {
        for culprit in 0..nodes.len() {
            on_nodes(nodes, |group, rank| {
                let bytes = if rank == culprit { 300_000 } else { 8 };
                let (mut input, mut output) = ([data(rank, bytes)], [vec![0xee; bytes]]);
                let error = group
                    .run(
                        &[call(Collective::AllReduce, DType::F32, 0, &mut input, &mut output)],
                        None,
                    )
                    .expect_err("they disagree");
                error.assert_says(ErrorKind::Mismatch, &["75000 × float32"]);
                assert!(output[0].iter().all(|&byte| byte == 0xee), "nothing was written");
                let again = group.run(&[Call::barrier(None)], None).expect_err("it has failed");
                assert_eq!(again, error);
            });
        }
    }
}

// proves P9
#[test]
fn a_node_that_rejects_a_call_is_reported_after_calls_of_cuda_tensors() {
    let over = std::sync::Barrier::new(2);
    on_nodes(&[0, 1], |group, rank| {
        group.run(&[Call::barrier(None)], None).expect("all alike");
        // As a launch does.
        group.recorder.ask(1);
        let outcome = if rank == 0 {
            group.reject("no such dtype".into());
            None
        } else {
            Some(group.run(&[Call::barrier(None)], None))
        };
        over.wait();
        if let Some(outcome) = outcome {
            let call = "blocked in barrier, collective #2";
            outcome
                .expect_err("rank 0 rejects it")
                .assert_says(ErrorKind::Mismatch, &[call, "no such dtype"]);
        }
    });
}

#[test]
fn messages_stay_on_a_node() {
    on_nodes(&[0, 1, 0, 1], |group, rank| {
        let lacks = group.single_node("symmetric memory works").err().expect("it is on two");
        assert!(
            lacks.message.contains(
                "node \"node0\" (ranks 0 and 2), node \"node1\" (ranks 1 and \
                3); symmetric memory works within"
            ),
            "{lacks}"
        );
        let mut byte = [rank as u8];
        let span = Span { addr: byte.as_mut_ptr().addr(), bytes: 1 };
        let message = |peer: u32| {
            crate::coll::message::Message::of(crate::coll::message::MessageSpec {
                peer: Some(Rank(peer)),
                tag: 0,
                dtype: DType::U8,
                span,
                timeout: None,
            })
        };
        let (said, heard) = std::sync::mpsc::channel();
        let completion = || {
            let said = said.clone();
            crate::completion::Completion::new(move |outcome: Result<()>, source| {
                said.send((outcome, source)).expect("somebody hears")
            })
        };
        let far: Error =
            group.recv(message(((rank + 1) % 4) as u32), completion()).expect_err("is elsewhere");
        assert_eq!(far.kind, ErrorKind::NotImplemented, "{far}");
        let near = (rank as u32 + 2) % 4;
        let ticket = if rank < 2 {
            group.send(message(near), completion())
        } else {
            group.recv(message(near), completion())
        }
        .expect("starts");
        group.wait(ticket, None).expect("ends");
        let (outcome, source) = heard.recv().expect("was told");
        assert_eq!((outcome, source), (Ok(()), (rank >= 2).then_some(Rank(near))));
        assert_eq!(byte[0], rank as u8 % 2);
    });
}
