//! Programs that run on host memory for all ranks at once give the results of the two-level
//! definition.
#![allow(unsafe_code, reason = "kernels on buffers of the test")]

mod ranks;

use super::levels::ReduceDtype;
use crate::coll::call::{CallSpec, Collective, Span};
use crate::dtype::{DType, ReduceOp};
use crate::kernels::cpu;
use crate::node_map::NodeMap;
use crate::rank::Rank;
use ranks::{Choice, layout, reduced, run_calls};

const LAYOUTS: [&[u8]; 7] = [
    &[0, 0, 1, 1],
    &[0, 0, 0, 1],
    &[0, 1],
    &[0, 0, 1, 1, 1, 2],
    &[0, 1, 0, 2, 1, 2],
    &[0, 1, 2],
    &[0, 0, 0, 1, 1, 1],
];

/// Pseudorandom bytes that depend only on `seed`.
pub(crate) fn data(seed: usize, bytes: usize) -> Vec<u8> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

/// All layouts, each on CPU and on CUDA tensors.
fn cases<'a>(layouts: &[&'a [u8]]) -> Vec<(Choice, &'a [u8])> {
    [Choice::CPU, Choice::CUDA]
        .into_iter()
        .flat_map(|choice| layouts.iter().map(move |&nodes| (choice, nodes)))
        .collect()
}

/// The buffers of one rank: inputs and outputs.
type Buffers = (Vec<Vec<u8>>, Vec<Vec<u8>>);

/// Runs `op` with the buffers of all ranks and fills the outputs.
fn collective(
    layout: &NodeMap,
    choice: Choice,
    op: Collective,
    dtype: DType,
    reduce_op: ReduceOp,
    root: usize,
    ranks: &mut [Buffers],
) {
    let spans = |buffers: &mut [Vec<u8>]| {
        buffers.iter_mut().map(|b| Span { addr: b.as_mut_ptr().addr(), bytes: b.len() }).collect()
    };
    let call = |(rank, (inputs, outputs)): (usize, &mut Buffers)| CallSpec {
        op,
        dtype,
        reduce_op,
        root: Rank(root as u32),
        factor: rank as f64 + 0.5,
        inputs: spans(inputs),
        outputs: spans(outputs),
        call_site: None,
    };
    let calls: Vec<CallSpec> = ranks.iter_mut().enumerate().map(call).collect();
    run_calls(layout, choice, &calls);
}

/// Returns the two-level reduction of the inputs of ranks on `nodes`.
fn two_level(op: ReduceOp, dtype: DType, layout: &NodeMap, inputs: &[Vec<u8>]) -> Vec<u8> {
    let n = inputs.len();
    let partial = |node: usize| {
        let ranks: Vec<usize> = layout.ranks_of(node).iter().map(|rank| rank.index()).collect();
        let factors: Vec<f64> = ranks.iter().map(|&rank| rank as f64 + 0.5).collect();
        reduced(
            op,
            dtype,
            &ranks.iter().map(|&rank| inputs[rank].clone()).collect::<Vec<_>>(),
            &factors,
        )
    };
    let partials: Vec<Vec<u8>> = (0..layout.num_nodes()).map(partial).collect();
    let sizes: Vec<usize> =
        (0..layout.num_nodes()).map(|node| layout.ranks_of(node).len()).collect();
    let ones = vec![1.0; partials.len()];
    if op == ReduceOp::Avg && sizes.iter().any(|&size| size != sizes[0]) {
        let shares: Vec<f64> = sizes.iter().map(|&size| size as f64 / n as f64).collect();
        return reduced(ReduceOp::PremulSum, dtype, &partials, &shares);
    }
    reduced(if op == ReduceOp::PremulSum { ReduceOp::Sum } else { op }, dtype, &partials, &ones)
}

#[test]
fn reductions_have_the_bits_of_two_levels_at_every_length() {
    let dtype = DType::BF16;
    for (choice, nodes) in cases(&LAYOUTS) {
        let (layout, n) = (layout(nodes), nodes.len());
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum, ReduceOp::Max] {
            // Empty, one rail, all rails, a chunk for each node.
            for bytes in [0, 2, 34, 65_536, 65_538, 1_700_002] {
                if bytes > 1_000_000 && op != ReduceOp::Sum {
                    continue;
                }
                let about = format!("{op:?} of {bytes} bytes on {nodes:?}");
                let inputs: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes)).collect();
                let wanted = two_level(op, dtype, &layout, &inputs);
                let mut ranks: Vec<Buffers> = inputs
                    .iter()
                    .map(|input| (vec![input.clone()], vec![vec![0xee; bytes]]))
                    .collect();
                collective(&layout, choice, Collective::AllReduce, dtype, op, 0, &mut ranks);
                assert!(
                    ranks.iter().all(|(_, outputs)| outputs[0] == wanted),
                    "all_reduce, {about}"
                );
                let root = n - 1;
                let output =
                    |rank: usize| if rank == root { vec![vec![0xee; bytes]] } else { vec![] };
                let mut ranks: Vec<Buffers> = inputs
                    .iter()
                    .enumerate()
                    .map(|(rank, input)| (vec![input.clone()], output(rank)))
                    .collect();
                collective(&layout, choice, Collective::Reduce, dtype, op, root, &mut ranks);
                assert!(ranks[root].1[0] == wanted, "reduce, {about}");
                let give = |from: usize| -> Vec<Vec<u8>> {
                    (0..n).map(|to| data(from * n + to, bytes + 2 * to)).collect()
                };
                let mut ranks: Vec<Buffers> =
                    (0..n).map(|rank| (give(rank), vec![vec![0xee; bytes + 2 * rank]])).collect();
                collective(&layout, choice, Collective::ReduceScatter, dtype, op, 0, &mut ranks);
                for (rank, (_, outputs)) in ranks.iter().enumerate() {
                    let given: Vec<Vec<u8>> =
                        (0..n).map(|from| give(from).swap_remove(rank)).collect();
                    assert!(
                        outputs[0] == two_level(op, dtype, &layout, &given),
                        "reduce_scatter, {about}, rank {rank}"
                    );
                }
            }
        }
    }
}

/// Returns the result of the definition that rounds once.
fn rounded_once(op: ReduceOp, dtype: DType, layout: &NodeMap, inputs: &[Vec<u8>]) -> Vec<u8> {
    let count = inputs[0].len() / dtype.size();
    let widen = |input: &Vec<u8>| {
        let mut wide = vec![0; count * 4];
        // SAFETY: buffers of `count` elements each.
        unsafe { cpu::widen(dtype, wide.as_mut_ptr(), input.as_ptr(), count) }
        wide
    };
    let wide = two_level(op, DType::F32, layout, &inputs.iter().map(widen).collect::<Vec<_>>());
    let mut output = vec![0; inputs[0].len()];
    // SAFETY: as above.
    unsafe { cpu::narrow(dtype, output.as_mut_ptr(), wide.as_ptr(), count) }
    output
}

#[test]
fn sums_of_narrow_floats_are_rounded_once_where_ranks_have_chosen_so() {
    for (choice, nodes) in cases(&[&[0, 0, 1, 1], &[0, 1], &[0, 0, 0, 1], &[0, 0, 1, 1, 1, 2]]) {
        let choice = Choice { partials: ReduceDtype::Fp32, ..choice };
        let (layout, n) = (layout(nodes), nodes.len());
        let kinds = [
            (DType::BF16, ReduceOp::Sum),
            (DType::F16, ReduceOp::Avg),
            (DType::F8E5M2, ReduceOp::PremulSum),
            (DType::BF16, ReduceOp::Max),
        ];
        for (dtype, op) in kinds {
            let definition = if op == ReduceOp::Max { two_level } else { rounded_once };
            // Empty, one rail, all rails, a chunk for each node.
            let longest =
                if op == ReduceOp::Sum && layout.num_nodes() > 2 { 700_002 } else { 66_002 };
            for bytes in [0, 2, 18, longest] {
                let about = format!("{op:?} of {bytes} bytes, {dtype:?}, on {nodes:?}");
                let inputs: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes)).collect();
                let wanted = definition(op, dtype, &layout, &inputs);
                let mut ranks: Vec<Buffers> = inputs
                    .iter()
                    .map(|input| (vec![input.clone()], vec![vec![0xee; bytes]]))
                    .collect();
                collective(&layout, choice, Collective::AllReduce, dtype, op, 0, &mut ranks);
                assert!(
                    ranks.iter().all(|(_, outputs)| outputs[0] == wanted),
                    "all_reduce, {about}"
                );
                let output =
                    |rank: usize| if rank == n - 1 { vec![vec![0xee; bytes]] } else { vec![] };
                let mut ranks: Vec<Buffers> = inputs
                    .iter()
                    .enumerate()
                    .map(|(rank, input)| (vec![input.clone()], output(rank)))
                    .collect();
                collective(&layout, choice, Collective::Reduce, dtype, op, n - 1, &mut ranks);
                assert!(ranks[n - 1].1[0] == wanted, "reduce, {about}");
                let give = |from: usize| -> Vec<Vec<u8>> {
                    (0..n).map(|to| data(from * n + to, bytes + 2 * to)).collect()
                };
                let mut ranks: Vec<Buffers> =
                    (0..n).map(|rank| (give(rank), vec![vec![0xee; bytes + 2 * rank]])).collect();
                collective(&layout, choice, Collective::ReduceScatter, dtype, op, 0, &mut ranks);
                for (rank, (_, outputs)) in ranks.iter().enumerate() {
                    let given: Vec<Vec<u8>> =
                        (0..n).map(|from| give(from).swap_remove(rank)).collect();
                    assert!(
                        outputs[0] == definition(op, dtype, &layout, &given),
                        "reduce_scatter, {about}, rank {rank}"
                    );
                }
            }
        }
    }
}

#[test]
fn long_reduce_scatters_go_in_chunks() {
    // Several chunks of each rail's slice, in one type and as float32.
    for (nodes, partials, bytes) in [
        (&[0, 1][..], ReduceDtype::Tensor, (9 << 20) + 6),
        (&[0, 0, 1, 1], ReduceDtype::Fp32, (9 << 20) + 6),
    ] {
        let (layout, n, choice) = (layout(nodes), nodes.len(), Choice { partials, ..Choice::CUDA });
        let (dtype, op) = if partials == ReduceDtype::Fp32 {
            (DType::BF16, ReduceOp::Sum)
        } else {
            (DType::I16, ReduceOp::BitXor)
        };
        // Inputs that are not contiguous; the last one is shorter.
        let length = |to: usize| bytes - if to == n - 1 { 1000 } else { 0 };
        let given: Vec<Vec<Vec<u8>>> =
            (0..n).map(|from| (0..n).map(|to| data(from * n + to, length(to))).collect()).collect();
        let mut ranks: Vec<Buffers> =
            (0..n).map(|rank| (given[rank].clone(), vec![vec![0xee; length(rank)]])).collect();
        collective(&layout, choice, Collective::ReduceScatter, dtype, op, 0, &mut ranks);
        for (rank, (_, outputs)) in ranks.iter().enumerate() {
            let inputs: Vec<Vec<u8>> = given.iter().map(|inputs| inputs[rank].clone()).collect();
            let definition = if partials == ReduceDtype::Fp32 { rounded_once } else { two_level };
            assert!(
                outputs[0] == definition(op, dtype, &layout, &inputs),
                "{nodes:?}, rank {rank}"
            );
        }
    }
}

#[test]
fn memory_of_reductions_does_not_grow_with_their_length() {
    for (choice, nodes) in cases(&LAYOUTS) {
        let (layout, n) = (layout(nodes), nodes.len());
        for (op, partials, apart) in [
            (Collective::AllReduce, ReduceDtype::Tensor, 0),
            (Collective::AllReduce, ReduceDtype::Fp32, 0),
            (Collective::ReduceScatter, ReduceDtype::Tensor, 0),
            (Collective::ReduceScatter, ReduceDtype::Fp32, 0),
            // Inputs that are not contiguous are copied.
            (Collective::ReduceScatter, ReduceDtype::Fp32, 16),
        ] {
            let memory = |bytes: usize| {
                // Planning accesses no memory.
                let spans = |count| {
                    (0..count)
                        .map(|at| Span { addr: (1 << 40) + at * (bytes + apart), bytes })
                        .collect()
                };
                let inputs = if op == Collective::AllReduce { spans(1) } else { spans(n) };
                let (dtype, reduce_op, outputs) =
                    (DType::BF16, ReduceOp::Sum, vec![Span { addr: 1 << 50, bytes }].into());
                let call =
                    CallSpec { op, dtype, reduce_op, inputs, outputs, ..CallSpec::barrier(None) };
                let choice = Choice { partials, ..choice };
                let programs = (0..n).map(|rank| choice.plan(&call, &layout, rank, None));
                programs.map(|program| program.temp + program.aside).max().unwrap_or(0)
            };
            // The memory holds several chunks for each rail and stage: inputs, wider copies,
            // partial results of all nodes, and sums.
            let (stages, wider) = if choice.rules.slices_first {
                (3, if partials == ReduceDtype::Fp32 { 2 } else { 1 })
            } else {
                (2, 1)
            };
            let most = stages
                * (layout.num_rails() + 2 * layout.num_nodes() + 4)
                * choice.thresholds.chunk_bytes
                * wider;
            let [long, longer] =
                [64, 256].map(|pieces| memory(pieces * choice.thresholds.chunk_bytes));
            assert!(long <= most, "{op:?} with {partials:?} on {nodes:?}: {long} bytes");
            assert!(longer <= long + (1 << 20), "{op:?} with {partials:?} on {nodes:?}");
        }
    }
}

#[test]
fn movements_bring_everything_where_it_belongs() {
    for (choice, nodes) in cases(&LAYOUTS) {
        let (layout, n) = (layout(nodes), nodes.len());
        let run = |op, root, ranks: &mut [Buffers]| {
            collective(&layout, choice, op, DType::U8, ReduceOp::Sum, root, ranks)
        };
        for bytes in [0, 1, 16, 999, 70_001] {
            let about = |op: Collective| format!("{} of {bytes} bytes on {nodes:?}", op.name());
            for uneven in [0, 1] {
                let all: Vec<Vec<u8>> =
                    (0..n).map(|from| data(from, bytes + uneven * from)).collect();
                let blank: Vec<Vec<u8>> = all.iter().map(|one| vec![0xee; one.len()]).collect();
                let mut ranks: Vec<Buffers> =
                    all.iter().map(|one| (vec![one.clone()], blank.clone())).collect();
                run(Collective::AllGather, 0, &mut ranks);
                assert!(
                    ranks.iter().all(|(_, outputs)| *outputs == all),
                    "{}",
                    about(Collective::AllGather)
                );
            }
            // Outputs that are contiguous.
            let mut whole: Vec<(Vec<u8>, Vec<u8>)> =
                (0..n).map(|from| (data(from, bytes), vec![0xee; n * bytes])).collect();
            let call = |(input, output): &mut (Vec<u8>, Vec<u8>)| {
                let (from, to) = (input.as_mut_ptr().addr(), output.as_mut_ptr().addr());
                let outputs = (0..n).map(|at| Span { addr: to + at * bytes, bytes }).collect();
                let (dtype, reduce_op, inputs) =
                    (DType::U8, ReduceOp::Sum, vec![Span { addr: from, bytes }]);
                CallSpec {
                    op: Collective::AllGather,
                    dtype,
                    reduce_op,
                    inputs: inputs.into(),
                    outputs,
                    ..CallSpec::barrier(None)
                }
            };
            let calls: Vec<CallSpec> = whole.iter_mut().map(call).collect();
            run_calls(&layout, choice, &calls);
            let wanted: Vec<u8> = (0..n).flat_map(|from| data(from, bytes)).collect();
            assert!(
                whole.iter().all(|(_, output)| *output == wanted),
                "{}",
                about(Collective::AllGather)
            );

            let length = |from: usize, to: usize| bytes * (to % 2) + from;
            let give =
                |rank: usize| (0..n).map(|to| data(rank * n + to, length(rank, to))).collect();
            let take = |rank: usize| (0..n).map(|from| vec![0xee; length(from, rank)]).collect();
            let mut ranks: Vec<Buffers> = (0..n).map(|rank| (give(rank), take(rank))).collect();
            run(Collective::AllToAll, 0, &mut ranks);
            for (rank, (_, outputs)) in ranks.iter().enumerate() {
                assert!(
                    (0..n).all(|from| outputs[from] == data(from * n + rank, length(from, rank))),
                    "{}",
                    about(Collective::AllToAll)
                );
            }
            for root in [0, n - 1] {
                let even: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes)).collect();
                let blank = || vec![vec![0xee; bytes]];
                let own = |rank: usize| {
                    if rank == root {
                        (vec![even[root].clone()], vec![])
                    } else {
                        (vec![], blank())
                    }
                };
                let mut ranks: Vec<Buffers> = (0..n).map(own).collect();
                run(Collective::Broadcast, root, &mut ranks);
                let right = |(rank, (_, outputs)): (usize, &Buffers)| {
                    rank == root || outputs[0] == even[root]
                };
                assert!(ranks.iter().enumerate().all(right), "{}", about(Collective::Broadcast));
                let all =
                    |rank: usize, of: &[Vec<u8>]| if rank == root { of.to_vec() } else { vec![] };
                let mut ranks: Vec<Buffers> = (0..n)
                    .map(|rank| (vec![even[rank].clone()], all(rank, &vec![vec![0xee; bytes]; n])))
                    .collect();
                run(Collective::Gather, root, &mut ranks);
                assert!(ranks[root].1 == even, "{}", about(Collective::Gather));
                let mut ranks: Vec<Buffers> =
                    (0..n).map(|rank| (all(rank, &even), blank())).collect();
                run(Collective::Scatter, root, &mut ranks);
                assert!(
                    ranks.iter().zip(&even).all(|((_, outputs), one)| outputs[0] == *one),
                    "{}",
                    about(Collective::Scatter)
                );
            }
        }
        run(Collective::Barrier, 0, &mut vec![(vec![], vec![]); n]);
    }
}

#[test]
fn all_to_alls_of_every_length_go_by_carriers() {
    for nodes in LAYOUTS {
        let (layout, n) = (layout(nodes), nodes.len());
        // Over one rail, over all, in several steps; also in place.
        for bytes in [0, 1, 40, 2000, 16_384, 16_385, 64_000, 300_001] {
            let give = |rank: usize| -> Vec<Vec<u8>> {
                (0..n).map(|to| data(rank * n + to, bytes)).collect()
            };
            let wanted = |rank: usize| -> Vec<Vec<u8>> {
                (0..n).map(|from| data(from * n + rank, bytes)).collect()
            };
            let mut ranks: Vec<Buffers> =
                (0..n).map(|rank| (give(rank), vec![vec![0xee; bytes]; n])).collect();
            collective(
                &layout,
                Choice::CPU,
                Collective::AllToAll,
                DType::U8,
                ReduceOp::Sum,
                0,
                &mut ranks,
            );
            let right = |(rank, (_, outputs)): (usize, &Buffers)| *outputs == wanted(rank);
            assert!(ranks.iter().enumerate().all(right), "{bytes} bytes each on {nodes:?}");
            let mut buffers: Vec<Vec<Vec<u8>>> = (0..n).map(give).collect();
            let call = |buffers: &mut Vec<Vec<u8>>| {
                let spans: Vec<Span> = buffers
                    .iter_mut()
                    .map(|b| Span { addr: b.as_mut_ptr().addr(), bytes: b.len() })
                    .collect();
                CallSpec {
                    op: Collective::AllToAll,
                    inputs: spans.clone().into(),
                    outputs: spans.into(),
                    ..CallSpec::barrier(None)
                }
            };
            let calls: Vec<CallSpec> = buffers.iter_mut().map(call).collect();
            run_calls(&layout, Choice::CPU, &calls);
            assert!(
                buffers.iter().enumerate().all(|(rank, got)| *got == wanted(rank)),
                "{bytes} bytes each in place on {nodes:?}"
            );
        }
        // Only the message from the last rank to the first is longer.
        let length = |from: usize, to: usize| if (from, to) == (n - 1, 0) { 90_000 } else { 3 };
        let give = |rank: usize| (0..n).map(|to| data(rank * n + to, length(rank, to))).collect();
        let take = |rank: usize| (0..n).map(|from| vec![0xee; length(from, rank)]).collect();
        let mut ranks: Vec<Buffers> = (0..n).map(|rank| (give(rank), take(rank))).collect();
        collective(
            &layout,
            Choice::CPU,
            Collective::AllToAll,
            DType::U8,
            ReduceOp::Sum,
            0,
            &mut ranks,
        );
        for (rank, (_, outputs)) in ranks.iter().enumerate() {
            assert!(
                (0..n).all(|from| outputs[from] == data(from * n + rank, length(from, rank))),
                "{nodes:?}, rank {rank}"
            );
        }
    }
}
