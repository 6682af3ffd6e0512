//! Collectives on several nodes. Groups of threads stand for the nodes, and the rails between them
//! reject lengths that do not match.
#![allow(unsafe_code, reason = "the reference is one call of the kernel")]

mod thread_rail;

use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::two_level::tests::data;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::rank::Rank;
use std::time::{Duration, Instant};
use thread_rail::{on_nodes, on_nodes_until};

fn spans(buffers: &mut [Vec<u8>]) -> Vec<Span> {
    buffers
        .iter_mut()
        .map(|buffer| Span { addr: buffer.as_mut_ptr().addr(), bytes: buffer.len() })
        .collect()
}

fn call(
    op: Collective,
    dtype: DType,
    root: usize,
    inputs: &mut [Vec<u8>],
    outputs: &mut [Vec<u8>],
) -> Call<'static> {
    let (inputs, outputs) = (spans(inputs), spans(outputs));
    Call::inner(CallSpec {
        op,
        dtype,
        root: Rank(root as u32),
        inputs: inputs.into(),
        outputs: outputs.into(),
        ..CallSpec::barrier(None)
    })
}

/// Returns the sum of `inputs`, in order.
fn sum(dtype: DType, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut output = vec![0; inputs[0].len()];
    let sources: Vec<InputElements> =
        inputs.iter().map(|data| InputElements { ptr: data.as_ptr(), factor: 1.0 }).collect();
    // SAFETY: all buffers are of one length, a multiple of the element's size.
    unsafe {
        cpu::reduce(
            ReduceOp::Sum,
            dtype,
            output.as_mut_ptr(),
            &sources,
            output.len() / dtype.size(),
            WriteMode::Cached,
        )
    };
    output
}

const LAYOUTS: [&[u8]; 6] =
    [&[0, 0, 1, 1], &[0, 0, 0, 1], &[0, 1], &[0, 0, 1, 1, 1, 2], &[0, 1, 0, 2, 1, 2], &[0, 1, 2]];

/// Returns the two-level sum of the `inputs` of the ranks on `nodes`.
fn two_level(dtype: DType, nodes: &[u8], inputs: &[Vec<u8>]) -> Vec<u8> {
    let count = usize::from(*nodes.iter().max().expect("ranks")) + 1;
    let of_node = |node: usize| -> Vec<Vec<u8>> {
        (0..inputs.len())
            .filter(|&r| usize::from(nodes[r]) == node)
            .map(|r| inputs[r].clone())
            .collect()
    };
    sum(dtype, &(0..count).map(|node| sum(dtype, &of_node(node))).collect::<Vec<_>>())
}

#[test]
fn reductions_have_the_bits_of_two_levels_at_every_length() {
    let dtype = DType::BF16;
    for nodes in LAYOUTS {
        let n = nodes.len();
        on_nodes(nodes, |group, rank| {
            // Lengths: no data, data in slots, over all rails, and in several turns.
            // `two_level/tests.rs` carries out programs of every length.
            for bytes in [0, 34, 4040, 4042, 65_538, 1_700_002] {
                let inputs: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes)).collect();
                let (mut input, mut output) = ([inputs[rank].clone()], [vec![0xee; bytes]]);
                group
                    .run(&[call(Collective::AllReduce, dtype, 0, &mut input, &mut output)], None)
                    .expect("all_reduce");
                let wanted = two_level(dtype, nodes, &inputs);
                assert!(
                    output[0] == wanted,
                    "all_reduce of {bytes} bytes on {nodes:?}, rank {rank}"
                );
                let root = n - 1;
                let outputs = if rank == root { &mut output[..] } else { &mut [] };
                outputs.iter_mut().for_each(|output| output.fill(0xee));
                group
                    .run(&[call(Collective::Reduce, dtype, root, &mut input, outputs)], None)
                    .expect("reduce");
                assert!(output[0] == wanted, "reduce of {bytes} bytes on {nodes:?}, rank {rank}");
                if bytes > 2_000_000 {
                    continue;
                }
                let give = |from: usize| -> Vec<Vec<u8>> {
                    (0..n).map(|to| data(from * n + to, bytes + 2 * to)).collect()
                };
                let mut output = [vec![0xee; bytes + 2 * rank]];
                group
                    .run(
                        &[call(Collective::ReduceScatter, dtype, 0, &mut give(rank), &mut output)],
                        None,
                    )
                    .expect("reduce_scatter");
                let given: Vec<Vec<u8>> = (0..n).map(|from| give(from).swap_remove(rank)).collect();
                assert!(
                    output[0] == two_level(dtype, nodes, &given),
                    "reduce_scatter of {bytes} bytes on {nodes:?}, rank {rank}"
                );
            }
        });
    }
}

#[test]
fn movements_bring_everything_where_it_belongs() {
    for nodes in LAYOUTS {
        let n = nodes.len();
        on_nodes(nodes, |group, rank| {
            let run = |op, root, inputs: &mut [Vec<u8>], outputs: &mut [Vec<u8>]| {
                group
                    .run(&[call(op, DType::U8, root, inputs, outputs)], None)
                    .unwrap_or_else(|error| panic!("{op:?}: {error}"));
            };
            for bytes in [0, 999, 2016, 2017, 70_001] {
                let about = |op: Collective| {
                    format!("{} of {bytes} bytes on {nodes:?}, rank {rank}", op.name())
                };
                let all: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes + from)).collect();
                let mut outputs: Vec<Vec<u8>> =
                    all.iter().map(|one| vec![0xee; one.len()]).collect();
                run(Collective::AllGather, 0, &mut [all[rank].clone()], &mut outputs);
                assert!(outputs == all, "{}", about(Collective::AllGather));
                let length = |from: usize, to: usize| bytes * (to % 2) + from;
                let mut give: Vec<Vec<u8>> =
                    (0..n).map(|to| data(rank * n + to, length(rank, to))).collect();
                let mut take: Vec<Vec<u8>> =
                    (0..n).map(|from| vec![0xee; length(from, rank)]).collect();
                run(Collective::AllToAll, 0, &mut give, &mut take);
                assert!(
                    (0..n).all(|from| take[from] == data(from * n + rank, length(from, rank))),
                    "{}",
                    about(Collective::AllToAll)
                );
                for root in [0, n - 1] {
                    let even: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes)).collect();
                    let mut one =
                        vec![if rank == root { even[root].clone() } else { vec![0xee; bytes] }];
                    let (give, take) = if rank == root {
                        (&mut one[..], &mut [][..])
                    } else {
                        (&mut [][..], &mut one[..])
                    };
                    run(Collective::Broadcast, root, give, take);
                    assert!(one[0] == even[root], "{}", about(Collective::Broadcast));
                    let mut all = if rank == root { vec![vec![0xee; bytes]; n] } else { vec![] };
                    run(Collective::Gather, root, &mut [even[rank].clone()], &mut all);
                    assert!(rank != root || all == even, "{}", about(Collective::Gather));
                    one[0].fill(0xee);
                    run(Collective::Scatter, root, &mut all, &mut one);
                    assert!(one[0] == even[rank], "{}", about(Collective::Scatter));
                }
                run(Collective::Barrier, 0, &mut [], &mut []);
            }
            // Lengths in slots, over one rail, over all rails, and in several turns; also in place.
            for bytes in [0, 40, 16_385, 300_001] {
                let mut give: Vec<Vec<u8>> = (0..n).map(|to| data(rank * n + to, bytes)).collect();
                let mut take = vec![vec![0xee; bytes]; n];
                run(Collective::AllToAll, 0, &mut give, &mut take);
                let right: Vec<Vec<u8>> = (0..n).map(|from| data(from * n + rank, bytes)).collect();
                assert!(
                    take == right,
                    "all_to_all of {bytes} bytes each on {nodes:?}, rank {rank}"
                );
                let same = spans(&mut give);
                let in_place = Call::inner(CallSpec {
                    op: Collective::AllToAll,
                    inputs: same.clone().into(),
                    outputs: same.into(),
                    ..CallSpec::barrier(None)
                });
                group.run(&[in_place], None).expect("all_to_all in place");
                assert!(
                    give == right,
                    "all_to_all of {bytes} bytes each in place on {nodes:?}, rank {rank}"
                );
            }
        });
    }
}

/// Lengths of all_to_all that agree in part: each rank has one length for all, or none does, or
/// single pairs differ.
#[test]
fn unequal_lengths_of_all_to_all_fit_or_are_a_mismatch() {
    for nodes in LAYOUTS {
        let n = nodes.len();
        on_nodes(nodes, |group, rank| {
            // Only the message from the last rank to the first is longer.
            let length = |from: usize, to: usize| if (from, to) == (n - 1, 0) { 90_000 } else { 3 };
            let mut give: Vec<Vec<u8>> =
                (0..n).map(|to| data(rank * n + to, length(rank, to))).collect();
            let mut take: Vec<Vec<u8>> =
                (0..n).map(|from| vec![0xee; length(from, rank)]).collect();
            group
                .run(&[call(Collective::AllToAll, DType::U8, 0, &mut give, &mut take)], None)
                .expect("all_to_all");
            assert!(
                (0..n).all(|from| take[from] == data(from * n + rank, length(from, rank))),
                "{nodes:?}, rank {rank}"
            );
            // Each rank has one length for all, and the length of the last rank differs.
            let bytes = if rank == n - 1 { 8 } else { 16 };
            let (mut give, mut take) = (vec![vec![1; bytes]; n], vec![vec![0xee; bytes]; n]);
            let error = group
                .run(&[call(Collective::AllToAll, DType::U8, 0, &mut give, &mut take)], None)
                .expect_err("they disagree");
            assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
            assert!(error.message.contains("bytes to rank"), "{error}");
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
            // A rail timed out, or a rank of the node that waited for it, perhaps a moment later.
            assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
            assert!(error.message.contains("reached its timeout after"), "{error}");
            assert!(took < Duration::from_secs(10), "rank {rank} of {n}");
            assert_eq!(second.expect_err("it has failed"), error);
        });
    }
}

#[test]
fn an_abort_within_calls_ends_them_on_all_nodes() {
    for op in [Collective::AllReduce, Collective::AllToAll] {
        on_nodes(&[0, 0, 1, 1, 1], |group, rank| {
            std::thread::scope(|scope| {
                if rank == 1 {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(50));
                        group.abort();
                    });
                }
                let count = if op == Collective::AllReduce { 1 } else { 5 };
                let (mut inputs, mut outputs) =
                    (vec![data(rank, 1_000_000); count], vec![vec![0; 1_000_000]; count]);
                let begun = Instant::now();
                let error = loop {
                    if let Err(error) =
                        group.run(&[call(op, DType::U8, 0, &mut inputs, &mut outputs)], None)
                    {
                        break error;
                    }
                };
                assert!(error.message.contains("aborted group \"test\""), "{error}");
                assert!(begun.elapsed() < Duration::from_secs(20), "rank {rank}");
            });
        });
    }
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
                assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
                assert!(error.message.contains("75000 × float32"), "{error}");
                assert!(output[0].iter().all(|&byte| byte == 0xee), "nothing was written");
                let again = group.run(&[Call::barrier(None)], None).expect_err("it has failed");
                assert_eq!(again, error);
            });
        }
    }
}

#[test]
fn a_late_node_is_named_at_the_deadline() {
    on_nodes(&[0, 0, 1, 1], |group, rank| {
        if rank >= 2 {
            std::thread::sleep(Duration::from_millis(900));
            return;
        }
        let begun = Instant::now();
        let error = group
            .run(&[Call::barrier(None)], Some(Duration::from_millis(200)))
            .expect_err("nobody comes");
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        assert!(
            error.message.contains("on rail 0, waiting for node \"node1\" (ranks 2 and 3)"),
            "{error}"
        );
        assert!(begun.elapsed() < Duration::from_millis(800));
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
