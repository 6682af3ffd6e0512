//! Programs that run on host memory for all ranks at once give the results of the two-level
//! definition.
#![allow(unsafe_code, reason = "kernels on buffers of the test")]

pub(crate) mod ranks;

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

/// Returns every layout with the choices for CPU tensors and with the choices for CUDA tensors.
fn cases<'a>(layouts: &[&'a [u8]]) -> Vec<(Choice, &'a [u8])> {
    [Choice::CPU, Choice::CUDA]
        .into_iter()
        .flat_map(|choice| layouts.iter().map(move |&nodes| (choice, nodes)))
        .collect()
}

/// The inputs or the outputs of one rank.
pub(crate) type Buffers = Vec<Vec<u8>>;

pub(crate) fn spans(buffers: &mut [Vec<u8>]) -> Vec<Span> {
    buffers.iter_mut().map(|b| Span { addr: b.as_mut_ptr().addr(), bytes: b.len() }).collect()
}

/// Returns outputs of these lengths, which no call has written.
pub(crate) fn blank(wanted: &[Vec<u8>]) -> Buffers {
    wanted.iter().map(|bytes| vec![0xee; bytes.len()]).collect()
}

/// One collective: the inputs of each rank, and the outputs that it must get.
pub(crate) struct Example {
    pub(crate) op: Collective,
    pub(crate) root: usize,
    pub(crate) given: Vec<Buffers>,
    pub(crate) wanted: Vec<Buffers>,
}

impl Example {
    /// Runs the collective on emulated ranks, and compares their outputs.
    fn check(
        &self,
        layout: &NodeMap,
        choice: Choice,
        (reduce_op, dtype): (ReduceOp, DType),
        about: &str,
    ) {
        let (mut given, mut outputs): (Vec<Buffers>, Vec<Buffers>) =
            (self.given.clone(), self.wanted.iter().map(|wanted| blank(wanted)).collect());
        let call = |(rank, (inputs, outputs)): (usize, (&mut Buffers, &mut Buffers))| CallSpec {
            op: self.op,
            dtype,
            reduce_op,
            root: Rank(self.root as u32),
            factor: rank as f64 + 0.5,
            inputs: spans(inputs).into(),
            outputs: spans(outputs).into(),
            call_site: None,
            compares: None,
        };
        let calls: Vec<CallSpec> =
            given.iter_mut().zip(&mut outputs).enumerate().map(call).collect();
        run_calls(layout, choice, &calls);
        for (rank, (found, wanted)) in outputs.iter().zip(&self.wanted).enumerate() {
            assert!(found == wanted, "{} of {about}, rank {rank}", self.op.name());
        }
    }
}

/// An all_to_all in which rank `from` sends `length(from, to)` bytes to rank `to`.
pub(crate) fn all_to_all(n: usize, length: impl Fn(usize, usize) -> usize) -> Example {
    let message = |from: usize, to: usize| data(from * n + to, length(from, to));
    Example {
        op: Collective::AllToAll,
        root: 0,
        given: (0..n).map(|from| (0..n).map(|to| message(from, to)).collect()).collect(),
        wanted: (0..n).map(|to| (0..n).map(|from| message(from, to)).collect()).collect(),
    }
}

fn reduce_scatter(
    n: usize,
    length: impl Fn(usize) -> usize,
    definition: impl Fn(&[Vec<u8>]) -> Vec<u8>,
) -> Example {
    let parts = all_to_all(n, |_, to| length(to));
    let wanted = parts.wanted.iter().map(|inputs| vec![definition(inputs)]).collect();
    Example { op: Collective::ReduceScatter, wanted, ..parts }
}

/// Every reduction, with inputs of about `bytes` bytes on each of `n` ranks.
pub(crate) fn reductions(
    n: usize,
    bytes: usize,
    definition: impl Fn(&[Vec<u8>]) -> Vec<u8>,
) -> [Example; 3] {
    let all: Buffers = (0..n).map(|from| data(from, bytes)).collect();
    let wanted = vec![definition(&all)];
    let given: Vec<Buffers> = all.into_iter().map(|one| vec![one]).collect();
    let mut at_root = vec![vec![]; n];
    at_root[n - 1] = wanted.clone();
    let everywhere = vec![wanted; n];
    [
        Example { op: Collective::AllReduce, root: 0, given: given.clone(), wanted: everywhere },
        Example { op: Collective::Reduce, root: n - 1, given, wanted: at_root },
        reduce_scatter(n, |to| bytes + 2 * to, definition),
    ]
}

/// Every collective that only moves bytes, with `bytes` bytes or similar lengths.
pub(crate) fn movements(n: usize, bytes: usize) -> Vec<Example> {
    let inputs = |uneven: usize| -> Buffers {
        (0..n).map(|from| data(from, bytes + uneven * from)).collect()
    };
    let one_each = |all: &[Vec<u8>]| all.iter().map(|one| vec![one.clone()]).collect();
    let nothing = || vec![vec![]; n];
    let mut examples = vec![
        all_to_all(n, |from, to| bytes * (to % 2) + from),
        Example { op: Collective::Barrier, root: 0, given: nothing(), wanted: nothing() },
    ];
    for all in [inputs(0), inputs(1)] {
        let (op, given) = (Collective::AllGather, one_each(&all));
        examples.push(Example { op, root: 0, given, wanted: vec![all; n] });
    }
    for root in [0, n - 1] {
        let all = inputs(0);
        let (mut one, mut whole) = (nothing(), nothing());
        one[root] = vec![all[root].clone()];
        whole[root] = all.clone();
        let mut others = vec![one[root].clone(); n];
        others[root].clear();
        examples.extend([
            Example { op: Collective::Broadcast, root, given: one, wanted: others },
            Example { op: Collective::Gather, root, given: one_each(&all), wanted: whole.clone() },
            Example { op: Collective::Scatter, root, given: whole, wanted: one_each(&all) },
        ]);
    }
    examples
}

/// Returns the two-level reduction of the inputs of all ranks.
pub(crate) fn two_level(
    op: ReduceOp,
    dtype: DType,
    layout: &NodeMap,
    inputs: &[Vec<u8>],
) -> Vec<u8> {
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
        let layout = layout(nodes);
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum, ReduceOp::Max] {
            // Lengths: empty, over one rail, over all rails, and with a chunk for each node.
            for bytes in [0, 2, 34, 65_536, 65_538, 1_700_002] {
                if bytes > 1_000_000 && op != ReduceOp::Sum {
                    continue;
                }
                let definition = |inputs: &[Vec<u8>]| two_level(op, dtype, &layout, inputs);
                let about = format!("{op:?} of {bytes} bytes on {nodes:?}");
                for example in reductions(nodes.len(), bytes, definition) {
                    example.check(&layout, choice, (op, dtype), &about);
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
        let layout = layout(nodes);
        let kinds = [
            (DType::BF16, ReduceOp::Sum),
            (DType::F16, ReduceOp::Avg),
            (DType::F8E5M2, ReduceOp::PremulSum),
            (DType::BF16, ReduceOp::Max),
        ];
        for (dtype, op) in kinds {
            let once = if op == ReduceOp::Max { two_level } else { rounded_once };
            let definition = |inputs: &[Vec<u8>]| once(op, dtype, &layout, inputs);
            // Lengths: empty, over one rail, over all rails, and with a chunk for each node.
            let longest =
                if op == ReduceOp::Sum && layout.num_nodes() > 2 { 700_002 } else { 66_002 };
            for bytes in [0, 2, 18, longest] {
                let about = format!("{op:?} of {bytes} bytes, {dtype:?}, on {nodes:?}");
                for example in reductions(nodes.len(), bytes, definition) {
                    example.check(&layout, choice, (op, dtype), &about);
                }
            }
        }
    }
}

#[test]
fn long_reduce_scatters_go_in_chunks() {
    // Each rail's slice has several chunks. Partial results have the tensor's type or are float32.
    for (nodes, partials, (op, dtype)) in [
        (&[0, 1][..], ReduceDtype::Tensor, (ReduceOp::BitXor, DType::I16)),
        (&[0, 0, 1, 1], ReduceDtype::Fp32, (ReduceOp::Sum, DType::BF16)),
    ] {
        let (layout, n, choice) = (layout(nodes), nodes.len(), Choice { partials, ..Choice::CUDA });
        let definition = if partials == ReduceDtype::Fp32 { rounded_once } else { two_level };
        // Inputs that are not contiguous; the last one is shorter.
        let length = |to: usize| (9 << 20) + 6 - if to == n - 1 { 1000 } else { 0 };
        reduce_scatter(n, length, |inputs| definition(op, dtype, &layout, inputs)).check(
            &layout,
            choice,
            (op, dtype),
            &format!("long inputs on {nodes:?}"),
        );
    }
}

#[test]
fn memory_of_calls_does_not_grow_with_their_length() {
    for (choice, nodes) in cases(&LAYOUTS) {
        let (layout, n) = (layout(nodes), nodes.len());
        for (op, partials, apart) in [
            (Collective::AllReduce, ReduceDtype::Tensor, 0),
            (Collective::AllReduce, ReduceDtype::Fp32, 0),
            (Collective::ReduceScatter, ReduceDtype::Tensor, 0),
            (Collective::ReduceScatter, ReduceDtype::Fp32, 0),
            // Inputs that are not contiguous are copied.
            (Collective::ReduceScatter, ReduceDtype::Fp32, 16),
            (Collective::AllGather, ReduceDtype::Tensor, 0),
            // Outputs that are not contiguous.
            (Collective::AllGather, ReduceDtype::Tensor, 16),
        ] {
            // Between nodes of one rank, the backend of CUDA tensors gathers into one piece of
            // memory.
            if (op, apart) == (Collective::AllGather, 16)
                && choice.rules.any_memory
                && n == layout.num_nodes()
            {
                continue;
            }
            let memory = |bytes: usize| {
                // Planning accesses no memory.
                let spans = |count| {
                    (0..count)
                        .map(|at| Span { addr: (1 << 40) + at * (bytes + apart), bytes })
                        .collect()
                };
                let one = vec![Span { addr: 1 << 50, bytes }].into();
                let (inputs, outputs) = if op == Collective::AllGather {
                    (one, spans(n))
                } else {
                    (spans(if op == Collective::AllReduce { 1 } else { n }), one)
                };
                let (dtype, reduce_op) = (DType::BF16, ReduceOp::Sum);
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

const MOVED: (ReduceOp, DType) = (ReduceOp::Sum, DType::U8);

#[test]
fn movements_bring_everything_where_it_belongs() {
    for (choice, nodes) in cases(&LAYOUTS) {
        let (layout, n) = (layout(nodes), nodes.len());
        for bytes in [0, 1, 16, 999, 70_001] {
            for example in movements(n, bytes) {
                example.check(&layout, choice, MOVED, &format!("{bytes} bytes on {nodes:?}"));
            }
            // Outputs that are contiguous.
            let mut inputs: Buffers = (0..n).map(|from| data(from, bytes)).collect();
            let (whole, mut outputs) = (inputs.concat(), vec![vec![0xee; n * bytes]; n]);
            let call = |(input, output): (&mut Vec<u8>, &mut Vec<u8>)| {
                let (from, to) = (input.as_mut_ptr().addr(), output.as_mut_ptr().addr());
                let pieces: Vec<Span> =
                    (0..n).map(|at| Span { addr: to + at * bytes, bytes }).collect();
                CallSpec {
                    op: Collective::AllGather,
                    inputs: vec![Span { addr: from, bytes }].into(),
                    outputs: pieces.into(),
                    ..CallSpec::barrier(None)
                }
            };
            let calls: Vec<CallSpec> = inputs.iter_mut().zip(&mut outputs).map(call).collect();
            run_calls(&layout, choice, &calls);
            assert!(outputs.iter().all(|output| *output == whole), "{bytes} bytes on {nodes:?}");
        }
    }
}

#[test]
fn all_to_alls_of_every_length_go_by_carriers() {
    for nodes in LAYOUTS {
        let (layout, n) = (layout(nodes), nodes.len());
        // Lengths: over one rail, over all rails, and in several steps; also in place.
        for bytes in [0, 1, 40, 2000, 16_384, 16_385, 64_000, 300_001] {
            let about = format!("{bytes} bytes each on {nodes:?}");
            let example = all_to_all(n, |_, _| bytes);
            example.check(&layout, Choice::CPU, MOVED, &about);
            let mut buffers = example.given;
            let call = |buffers: &mut Buffers| {
                let (op, spans) = (Collective::AllToAll, spans(buffers));
                let (inputs, outputs) = (spans.clone().into(), spans.into());
                CallSpec { op, inputs, outputs, ..CallSpec::barrier(None) }
            };
            let calls: Vec<CallSpec> = buffers.iter_mut().map(call).collect();
            run_calls(&layout, Choice::CPU, &calls);
            assert!(buffers == example.wanted, "{about}, in place");
        }
        // Only the message from the last rank to the first is longer.
        let length = |from: usize, to: usize| if (from, to) == (n - 1, 0) { 90_000 } else { 3 };
        all_to_all(n, length).check(&layout, Choice::CPU, MOVED, &format!("{nodes:?}"));
    }
}
