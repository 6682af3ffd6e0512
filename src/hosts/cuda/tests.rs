//! Plans, carried out on the host's memory for all ranks at once, give what the two-level definition says.
#![allow(unsafe_code, reason = "plays kernels on buffers of the test")]

use super::backends::Transfer;
use super::cast::Cast;
use super::plan::{self, Plan};
use super::steps::Step;
use super::sum::{MOST_HOSTS, Sum, SumPartials};
use crate::coll::call::{Call, Op, Span, Spec};
use crate::coll::cost::wire::Thresholds;
use crate::dtype::{DType, ReduceOp};
use crate::host_map::{HostMap, Placement};
use crate::hosts::chosen::Chosen;
use crate::hosts::partials::Partials;
use crate::hosts::tests::data;
use crate::kernels::cpu::{self, Source, Store};
use crate::rank::Rank;
use std::collections::VecDeque;

const LAYOUTS: [&[u8]; 7] =
    [&[0, 0, 1, 1], &[0, 0, 0, 1], &[0, 1], &[0, 0, 1, 1, 1, 2], &[0, 1, 0, 2, 1, 2], &[0, 1, 2], &[0, 0, 0, 1, 1, 1]];

fn layout(hosts: &[u8]) -> HostMap {
    let place = |host: &u8| Placement::on(&format!("node{host}"));
    HostMap::of(&hosts.iter().map(place).collect::<Vec<_>>())
}

fn read(span: Span) -> Vec<u8> {
    // SAFETY: spans of plans are those of buffers that live, of this length.
    if span.bytes == 0 { vec![] } else { unsafe { std::slice::from_raw_parts(span.addr as *const u8, span.bytes) }.to_vec() }
}

fn write(bytes: &[u8], to: Span) {
    assert_eq!(bytes.len(), to.bytes, "lengths fit");
    // SAFETY: as above; nobody else has a reference.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.addr as *mut u8, bytes.len()) }
}

fn reduced(op: ReduceOp, dtype: DType, inputs: &[Vec<u8>], factors: &[f64]) -> Vec<u8> {
    let mut output = vec![0; inputs[0].len()];
    let source = |(data, &factor): (&Vec<u8>, &f64)| Source { ptr: data.as_ptr(), factor };
    let sources: Vec<Source> = inputs.iter().zip(factors).map(source).collect();
    // SAFETY: all buffers are of one length, a multiple of the element's size.
    unsafe { cpu::reduce(op, dtype, output.as_mut_ptr(), &sources, output.len() / dtype.size(), Store::Cached) };
    output
}

/// What the kernel of partials computes.
fn add_up(sum: &Sum, layout: &HostMap) {
    let (op, args) = sum.args(layout).expect("aligned");
    let host = |host: u32| Span { addr: (args.from + u64::from(host) * args.stride) as usize, bytes: sum.to.bytes };
    let partials: Vec<Vec<u8>> = (0..args.hosts).map(|at| read(host(at))).collect();
    let source = |(data, &factor): (&Vec<u8>, &f64)| Source { ptr: data.as_ptr(), factor };
    let sources: Vec<Source> = partials.iter().zip(&args.factor).map(source).collect();
    let mut output = vec![0; sum.to.bytes];
    let count = output.len() / sum.dtype.size();
    // SAFETY: all buffers are of one length, a multiple of the element's size.
    unsafe { cpu::reduce_partials(op, sum.dtype, output.as_mut_ptr(), &sources, count, args.divisor as usize) };
    write(&output, sum.to);
}

/// Runs one collective of the ranks of a host; `calls[r]` is that of the `r`th.
fn inside(calls: &[&Call]) {
    let n = calls.len();
    for call in calls {
        call.validate(Rank(calls.iter().position(|other| std::ptr::eq(*other, *call)).expect("there") as u32), n).expect("valid");
    }
    let given: Vec<Vec<Vec<u8>>> = calls.iter().map(|call| call.inputs.iter().map(|&span| read(span)).collect()).collect();
    let (op, dtype, reduce_op) = (calls[0].op, calls[0].dtype, calls[0].reduce_op);
    assert!(calls.iter().all(|call| (call.op, call.dtype, call.reduce_op) == (op, dtype, reduce_op)), "all run the same");
    let factors: Vec<f64> = calls.iter().map(|call| call.factor).collect();
    for (me, call) in calls.iter().enumerate() {
        for (at, &output) in call.outputs.iter().enumerate() {
            let bytes = match op {
                Op::AllGather => given[at][0].clone(),
                Op::AllToAll => given[at][me].clone(),
                Op::Broadcast => given[call.root.index()][0].clone(),
                Op::ReduceScatter => {
                    reduced(reduce_op, dtype, &given.iter().map(|inputs| inputs[me].clone()).collect::<Vec<_>>(), &factors)
                }
                Op::Barrier | Op::AllReduce | Op::Reduce | Op::Gather | Op::Scatter | Op::AllReduceAddRmsNorm => {
                    panic!("{op:?} is in no plan")
                }
            };
            write(&bytes, output);
        }
    }
}

/// What the kernels that widen and round do.
fn cast(Cast { from, to, dtype, widens }: Cast) {
    let (given, mut output) = (read(from), vec![0; to.bytes]);
    let count = if widens { from.bytes } else { to.bytes } / dtype.size();
    assert_eq!((given.len() + output.len(), count > 0), (count * (4 + dtype.size()), true), "lengths fit");
    let kernel = if widens { cpu::widen } else { cpu::narrow };
    // SAFETY: buffers of `count` elements each.
    unsafe { kernel(dtype, output.as_mut_ptr(), given.as_ptr(), count) }
    write(&output, to);
}

/// Carries out the plans of `calls`, one of each rank: in chunks as they are chosen, and in many. What goes beside the stream may go at once, or
/// when it is waited for: both are tried.
fn run(layout: &HostMap, chosen: Chosen, calls: &[Spec<'_>]) {
    let outputs = || calls.iter().flat_map(|call| call.outputs.iter().map(|&span| (span, read(span)))).collect::<Vec<_>>();
    let before = outputs();
    // Inputs that a call works on in place are back afterwards.
    let inputs: Vec<(Span, Vec<u8>)> = calls.iter().flat_map(|call| call.inputs.iter().map(|&span| (span, read(span)))).collect();
    let longest = inputs.iter().map(|(span, _)| span.bytes).max().unwrap_or(0);
    let many = Thresholds { piece: (longest / 20).next_multiple_of(64).max(64), gathered: 0, ..chosen.cuda };
    run_with(layout, chosen, calls, true);
    let once = outputs();
    for late in [false, true] {
        before.iter().chain(&inputs).for_each(|(span, bytes)| write(bytes, *span));
        run_with(layout, Chosen { cuda: many, ..chosen }, calls, late);
        assert!(outputs() == once, "in many chunks, late = {late}");
    }
}

fn run_with(layout: &HostMap, chosen: Chosen, calls: &[Spec<'_>], late: bool) {
    let n = calls.len();
    let mut waiting: Vec<VecDeque<Transfer>> = vec![VecDeque::new(); n];
    let mut memory: Vec<Vec<u128>> = Vec::new();
    let mut steps: Vec<VecDeque<Step>> = Vec::new();
    for (rank, call) in calls.iter().enumerate() {
        call.validate(Rank(rank as u32), n).expect("valid");
        let rank = Rank(rank as u32);
        let needed = plan::of(call, layout, chosen, rank, 0).memory;
        let mut own = vec![u128::MAX - 0xee; needed.div_ceil(16)];
        let Plan { steps: all, memory: again } = plan::of(call, layout, chosen, rank, own.as_mut_ptr().addr());
        assert_eq!(again, needed);
        memory.push(own);
        steps.push(all.into());
    }
    let mut sent: Vec<Vec<Option<Vec<u8>>>> = vec![vec![None; n]; n];
    while steps.iter().any(|steps| !steps.is_empty()) {
        let mut moved = false;
        for rank in 0..n {
            let me = Rank(rank as u32);
            let (host, local) = (layout.host(me), layout.local(me));
            match steps[rank].front().cloned() {
                None => continue,
                Some(Step::Copy { from, to }) => write(&read(from), to),
                Some(Step::Sum(sum)) => add_up(&sum, layout),
                Some(Step::Cast(one)) => cast(one),
                Some(Step::Exchange { give, take }) => {
                    for (to, &span) in give.iter().enumerate().filter(|(_, span)| span.bytes > 0) {
                        sent[rank][to].get_or_insert_with(|| read(span));
                    }
                    if take.iter().enumerate().any(|(from, span)| span.bytes > 0 && sent[from][rank].is_none()) {
                        // Its peers have not come yet.
                        continue;
                    }
                    take.iter().enumerate().filter(|(_, span)| span.bytes > 0).for_each(|(from, &span)| {
                        write(sent[from][rank].as_ref().expect("sent"), span);
                    });
                }
                Some(Step::Inside(_)) => {
                    let members: Vec<usize> = layout.members(host).iter().map(|rank| rank.index()).collect();
                    let all: Vec<Vec<Call>> = members
                        .iter()
                        .filter_map(|&member| match steps[member].front() {
                            Some(Step::Inside(calls)) => Some(calls.clone()),
                            _ => None,
                        })
                        .collect();
                    if local != 0 || all.len() < members.len() {
                        continue;
                    }
                    assert!(all.iter().all(|calls| calls.len() == all[0].len()), "as many calls");
                    (0..all[0].len()).for_each(|at| inside(&all.iter().map(|calls| &calls[at]).collect::<Vec<_>>()));
                    members.iter().skip(1).for_each(|&member| drop(steps[member].pop_front()));
                }
                Some(Step::Rail { transfer, beside: true }) if late => waiting[rank].push_back(transfer),
                Some(Step::Follow) if !late => {}
                Some(Step::Rail { .. } | Step::Follow) => {
                    let ranks: Vec<usize> = (0..layout.hosts()).map(|host| layout.members(host)[local].index()).collect();
                    let all: Vec<Transfer> = ranks
                        .iter()
                        .filter_map(|&rank| match steps[rank].front() {
                            Some(Step::Rail { transfer, beside }) if !(late && *beside) => Some(transfer.clone()),
                            Some(Step::Follow) => waiting[rank].front().cloned(),
                            _ => None,
                        })
                        .collect();
                    if host != 0 || all.len() < ranks.len() {
                        continue;
                    }
                    transferred(&all);
                    for &rank in ranks.iter().filter(|&&rank| matches!(steps[rank].front(), Some(Step::Follow))) {
                        waiting[rank].pop_front();
                    }
                    ranks.iter().skip(1).for_each(|&rank| drop(steps[rank].pop_front()));
                }
            }
            steps[rank].pop_front();
            moved = true;
        }
        assert!(moved, "plans wait for each other: {:?}", steps.iter().map(VecDeque::front).collect::<Vec<_>>());
    }
}

/// Runs one transfer of a rail.
fn transferred(all: &[Transfer]) {
    let cut = |addr: usize, lengths: &[usize], at: usize| Span { addr: addr + lengths[..at].iter().sum::<usize>(), bytes: lengths[at] };
    match &all[0] {
        Transfer::AllGather { .. } => {
            let given: Vec<Vec<u8>> = all
                .iter()
                .map(|transfer| {
                    let Transfer::AllGather { from, .. } = transfer else { panic!("{transfer:?} beside an all_gather") };
                    read(*from)
                })
                .collect();
            assert!(given.iter().all(|bytes| bytes.len() == given[0].len()), "equal lengths");
            for transfer in all {
                let Transfer::AllGather { to, .. } = transfer else { unreachable!() };
                write(&given.concat(), Span { addr: *to, bytes: given.len() * given[0].len() });
            }
        }
        Transfer::AllToAll { .. } => {
            let parts = |transfer: &Transfer| {
                let Transfer::AllToAll { from, sent, .. } = transfer else { panic!("{transfer:?} beside an all_to_all") };
                (0..sent.len()).map(|at| read(cut(*from, sent, at))).collect::<Vec<_>>()
            };
            let given: Vec<Vec<Vec<u8>>> = all.iter().map(parts).collect();
            for (me, transfer) in all.iter().enumerate() {
                let Transfer::AllToAll { to, received, .. } = transfer else { unreachable!() };
                given.iter().enumerate().for_each(|(from, parts)| write(&parts[me], cut(*to, received, from)));
            }
        }
        Transfer::Broadcast { root, .. } => {
            let at = |transfer: &Transfer| {
                let Transfer::Broadcast { at, .. } = transfer else { panic!("{transfer:?} beside a broadcast") };
                *at
            };
            let given = read(at(&all[*root]));
            all.iter().for_each(|transfer| write(&given, at(transfer)));
        }
    }
}

/// Buffers of one rank: inputs and outputs.
type Buffers = (Vec<Vec<u8>>, Vec<Vec<u8>>);

/// Runs `op` with the buffers of all ranks; the outputs are filled then.
fn collective(layout: &HostMap, op: Op, dtype: DType, reduce_op: ReduceOp, root: usize, ranks: &mut [Buffers]) {
    chosen_collective(layout, Chosen::USUAL, op, dtype, reduce_op, root, ranks);
}

fn chosen_collective(layout: &HostMap, chosen: Chosen, op: Op, dtype: DType, reduce_op: ReduceOp, root: usize, ranks: &mut [Buffers]) {
    let spans = |buffers: &mut [Vec<u8>]| buffers.iter_mut().map(|b| Span { addr: b.as_mut_ptr().addr(), bytes: b.len() }).collect();
    let call = |(rank, (inputs, outputs)): (usize, &mut Buffers)| Spec {
        op,
        dtype,
        reduce_op,
        root: Rank(root as u32),
        factor: rank as f64 + 0.5,
        inputs: spans(inputs),
        outputs: spans(outputs),
        call_site: None,
    };
    let calls: Vec<Spec> = ranks.iter_mut().enumerate().map(call).collect();
    run(layout, chosen, &calls);
}

/// The two-level reduction of what ranks on `hosts` give.
fn two_level(op: ReduceOp, dtype: DType, layout: &HostMap, inputs: &[Vec<u8>]) -> Vec<u8> {
    let n = inputs.len();
    let partial = |host: usize| {
        let ranks: Vec<usize> = layout.members(host).iter().map(|rank| rank.index()).collect();
        let factors: Vec<f64> = ranks.iter().map(|&rank| rank as f64 + 0.5).collect();
        reduced(op, dtype, &ranks.iter().map(|&rank| inputs[rank].clone()).collect::<Vec<_>>(), &factors)
    };
    let partials: Vec<Vec<u8>> = (0..layout.hosts()).map(partial).collect();
    let sizes: Vec<usize> = (0..layout.hosts()).map(|host| layout.members(host).len()).collect();
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
    for hosts in LAYOUTS {
        let (layout, n) = (layout(hosts), hosts.len());
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum, ReduceOp::Max] {
            // Nothing, one rail, all rails, pieces for each host.
            for bytes in [0, 2, 34, 65_536, 65_538, 1_700_002] {
                if bytes > 1_000_000 && op != ReduceOp::Sum {
                    continue;
                }
                let about = format!("{op:?} of {bytes} bytes on {hosts:?}");
                let inputs: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes)).collect();
                let wanted = two_level(op, dtype, &layout, &inputs);
                let mut ranks: Vec<Buffers> = inputs.iter().map(|input| (vec![input.clone()], vec![vec![0xee; bytes]])).collect();
                collective(&layout, Op::AllReduce, dtype, op, 0, &mut ranks);
                assert!(ranks.iter().all(|(_, outputs)| outputs[0] == wanted), "all_reduce, {about}");
                let root = n - 1;
                let output = |rank: usize| if rank == root { vec![vec![0xee; bytes]] } else { vec![] };
                let mut ranks: Vec<Buffers> = inputs.iter().enumerate().map(|(rank, input)| (vec![input.clone()], output(rank))).collect();
                collective(&layout, Op::Reduce, dtype, op, root, &mut ranks);
                assert!(ranks[root].1[0] == wanted, "reduce, {about}");
                let give = |from: usize| -> Vec<Vec<u8>> { (0..n).map(|to| data(from * n + to, bytes + 2 * to)).collect() };
                let mut ranks: Vec<Buffers> = (0..n).map(|rank| (give(rank), vec![vec![0xee; bytes + 2 * rank]])).collect();
                collective(&layout, Op::ReduceScatter, dtype, op, 0, &mut ranks);
                for (rank, (_, outputs)) in ranks.iter().enumerate() {
                    let given: Vec<Vec<u8>> = (0..n).map(|from| give(from).swap_remove(rank)).collect();
                    assert!(outputs[0] == two_level(op, dtype, &layout, &given), "reduce_scatter, {about}, rank {rank}");
                }
            }
        }
    }
}

/// What the definition with one rounding says.
fn rounded_once(op: ReduceOp, dtype: DType, layout: &HostMap, inputs: &[Vec<u8>]) -> Vec<u8> {
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
    let chosen = Chosen { partials: Partials::Fp32, ..Chosen::USUAL };
    for hosts in [&[0, 0, 1, 1][..], &[0, 1], &[0, 0, 0, 1], &[0, 0, 1, 1, 1, 2]] {
        let (layout, n) = (layout(hosts), hosts.len());
        let kinds =
            [(DType::BF16, ReduceOp::Sum), (DType::F16, ReduceOp::Avg), (DType::F8E5M2, ReduceOp::PremulSum), (DType::BF16, ReduceOp::Max)];
        for (dtype, op) in kinds {
            let definition = if op == ReduceOp::Max { two_level } else { rounded_once };
            // Nothing, one rail, all rails, and pieces for each host.
            let longest = if op == ReduceOp::Sum && layout.hosts() > 2 { 700_002 } else { 66_002 };
            for bytes in [0, 2, 18, longest] {
                let about = format!("{op:?} of {bytes} bytes, {dtype:?}, on {hosts:?}");
                let inputs: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes)).collect();
                let wanted = definition(op, dtype, &layout, &inputs);
                let mut ranks: Vec<Buffers> = inputs.iter().map(|input| (vec![input.clone()], vec![vec![0xee; bytes]])).collect();
                chosen_collective(&layout, chosen, Op::AllReduce, dtype, op, 0, &mut ranks);
                assert!(ranks.iter().all(|(_, outputs)| outputs[0] == wanted), "all_reduce, {about}");
                let output = |rank: usize| if rank == n - 1 { vec![vec![0xee; bytes]] } else { vec![] };
                let mut ranks: Vec<Buffers> = inputs.iter().enumerate().map(|(rank, input)| (vec![input.clone()], output(rank))).collect();
                chosen_collective(&layout, chosen, Op::Reduce, dtype, op, n - 1, &mut ranks);
                assert!(ranks[n - 1].1[0] == wanted, "reduce, {about}");
                let give = |from: usize| -> Vec<Vec<u8>> { (0..n).map(|to| data(from * n + to, bytes + 2 * to)).collect() };
                let mut ranks: Vec<Buffers> = (0..n).map(|rank| (give(rank), vec![vec![0xee; bytes + 2 * rank]])).collect();
                chosen_collective(&layout, chosen, Op::ReduceScatter, dtype, op, 0, &mut ranks);
                for (rank, (_, outputs)) in ranks.iter().enumerate() {
                    let given: Vec<Vec<u8>> = (0..n).map(|from| give(from).swap_remove(rank)).collect();
                    assert!(outputs[0] == definition(op, dtype, &layout, &given), "reduce_scatter, {about}, rank {rank}");
                }
            }
        }
    }
}

#[test]
fn long_reduce_scatters_go_in_chunks() {
    // Some chunks of the slice of each rail, in one type and as float32.
    for (hosts, partials, bytes) in [(&[0, 1][..], Partials::Tensor, (9 << 20) + 6), (&[0, 0, 1, 1], Partials::Fp32, (9 << 20) + 6)] {
        let (layout, n, chosen) = (layout(hosts), hosts.len(), Chosen { partials, ..Chosen::USUAL });
        let (dtype, op) = if partials == Partials::Fp32 { (DType::BF16, ReduceOp::Sum) } else { (DType::I16, ReduceOp::BitXor) };
        // Inputs that do not follow each other, of which the last is shorter.
        let length = |to: usize| bytes - if to == n - 1 { 1000 } else { 0 };
        let given: Vec<Vec<Vec<u8>>> = (0..n).map(|from| (0..n).map(|to| data(from * n + to, length(to))).collect()).collect();
        let mut ranks: Vec<Buffers> = (0..n).map(|rank| (given[rank].clone(), vec![vec![0xee; length(rank)]])).collect();
        chosen_collective(&layout, chosen, Op::ReduceScatter, dtype, op, 0, &mut ranks);
        for (rank, (_, outputs)) in ranks.iter().enumerate() {
            let inputs: Vec<Vec<u8>> = given.iter().map(|inputs| inputs[rank].clone()).collect();
            let definition = if partials == Partials::Fp32 { rounded_once } else { two_level };
            assert!(outputs[0] == definition(op, dtype, &layout, &inputs), "{hosts:?}, rank {rank}");
        }
    }
}

#[test]
fn memory_of_reductions_does_not_grow_with_their_length() {
    for hosts in LAYOUTS {
        let (layout, n) = (layout(hosts), hosts.len());
        for (op, partials, apart) in [
            (Op::AllReduce, Partials::Tensor, 0),
            (Op::AllReduce, Partials::Fp32, 0),
            (Op::ReduceScatter, Partials::Tensor, 0),
            (Op::ReduceScatter, Partials::Fp32, 0),
            // Inputs that do not follow each other are copied.
            (Op::ReduceScatter, Partials::Fp32, 16),
        ] {
            let memory = |bytes: usize| {
                // Nobody looks at what is there.
                let spans = |count| (0..count).map(|at| Span { addr: (1 << 40) + at * (bytes + apart), bytes }).collect();
                let inputs = if op == Op::AllReduce { spans(1) } else { spans(n) };
                let (dtype, reduce_op, outputs) = (DType::BF16, ReduceOp::Sum, vec![Span { addr: 1 << 50, bytes }].into());
                let call = Spec { op, dtype, reduce_op, inputs, outputs, ..Spec::barrier(None) };
                let chosen = Chosen { partials, ..Chosen::USUAL };
                (0..n).map(|rank| plan::of(&call, &layout, chosen, Rank(rank as u32), 0).memory).max().unwrap_or(0)
            };
            // Inputs, wider copies, partial results of all hosts, and sums: some chunks of 16 MiB for each rail, twice.
            let most = 2 * (layout.rails() + 2 * layout.hosts() + 4) * (16 << 20);
            assert!(memory(1 << 30) <= most, "{op:?} with {partials:?} on {hosts:?}: {} bytes", memory(1 << 30));
            assert!(memory(4 << 30) <= memory(1 << 30) + (1 << 20), "{op:?} with {partials:?} on {hosts:?}");
        }
    }
}

#[test]
fn movements_bring_everything_where_it_belongs() {
    for hosts in LAYOUTS {
        let (layout, n) = (layout(hosts), hosts.len());
        let run = |op, root, ranks: &mut [Buffers]| collective(&layout, op, DType::U8, ReduceOp::Sum, root, ranks);
        for bytes in [0, 1, 16, 999, 70_001] {
            let about = |op: Op| format!("{} of {bytes} bytes on {hosts:?}", op.name());
            for uneven in [0, 1] {
                let all: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes + uneven * from)).collect();
                let blank: Vec<Vec<u8>> = all.iter().map(|one| vec![0xee; one.len()]).collect();
                let mut ranks: Vec<Buffers> = all.iter().map(|one| (vec![one.clone()], blank.clone())).collect();
                run(Op::AllGather, 0, &mut ranks);
                assert!(ranks.iter().all(|(_, outputs)| *outputs == all), "{}", about(Op::AllGather));
            }
            // Outputs that follow each other.
            let mut whole: Vec<(Vec<u8>, Vec<u8>)> = (0..n).map(|from| (data(from, bytes), vec![0xee; n * bytes])).collect();
            let call = |(input, output): &mut (Vec<u8>, Vec<u8>)| {
                let (from, to) = (input.as_mut_ptr().addr(), output.as_mut_ptr().addr());
                let outputs = (0..n).map(|at| Span { addr: to + at * bytes, bytes }).collect();
                let (dtype, reduce_op, inputs) = (DType::U8, ReduceOp::Sum, vec![Span { addr: from, bytes }]);
                Spec { op: Op::AllGather, dtype, reduce_op, inputs: inputs.into(), outputs, ..Spec::barrier(None) }
            };
            let calls: Vec<Spec> = whole.iter_mut().map(call).collect();
            super::tests::run(&layout, Chosen::USUAL, &calls);
            let wanted: Vec<u8> = (0..n).flat_map(|from| data(from, bytes)).collect();
            assert!(whole.iter().all(|(_, output)| *output == wanted), "{}", about(Op::AllGather));

            let length = |from: usize, to: usize| bytes * (to % 2) + from;
            let give = |rank: usize| (0..n).map(|to| data(rank * n + to, length(rank, to))).collect();
            let take = |rank: usize| (0..n).map(|from| vec![0xee; length(from, rank)]).collect();
            let mut ranks: Vec<Buffers> = (0..n).map(|rank| (give(rank), take(rank))).collect();
            run(Op::AllToAll, 0, &mut ranks);
            for (rank, (_, outputs)) in ranks.iter().enumerate() {
                assert!((0..n).all(|from| outputs[from] == data(from * n + rank, length(from, rank))), "{}", about(Op::AllToAll));
            }
            for root in [0, n - 1] {
                let even: Vec<Vec<u8>> = (0..n).map(|from| data(from, bytes)).collect();
                let blank = || vec![vec![0xee; bytes]];
                let own = |rank: usize| if rank == root { (vec![even[root].clone()], vec![]) } else { (vec![], blank()) };
                let mut ranks: Vec<Buffers> = (0..n).map(own).collect();
                run(Op::Broadcast, root, &mut ranks);
                let right = |(rank, (_, outputs)): (usize, &Buffers)| rank == root || outputs[0] == even[root];
                assert!(ranks.iter().enumerate().all(right), "{}", about(Op::Broadcast));
                let all = |rank: usize, of: &[Vec<u8>]| if rank == root { of.to_vec() } else { vec![] };
                let mut ranks: Vec<Buffers> =
                    (0..n).map(|rank| (vec![even[rank].clone()], all(rank, &vec![vec![0xee; bytes]; n]))).collect();
                run(Op::Gather, root, &mut ranks);
                assert!(ranks[root].1 == even, "{}", about(Op::Gather));
                let mut ranks: Vec<Buffers> = (0..n).map(|rank| (all(rank, &even), blank())).collect();
                run(Op::Scatter, root, &mut ranks);
                assert!(ranks.iter().zip(&even).all(|((_, outputs), one)| outputs[0] == *one), "{}", about(Op::Scatter));
            }
        }
        run(Op::Barrier, 0, &mut vec![(vec![], vec![]); n]);
    }
}

#[test]
fn sums_over_integers_divide_by_all_ranks_and_weigh_uneven_hosts() {
    let layout = layout(&[0, 0, 0, 1]);
    let sum = |dtype, op| Sum { from: 32, stride: 48, to: Span { addr: 5, bytes: 40 }, dtype, op };
    let (op, args) = sum(DType::I32, ReduceOp::Avg).args(&layout).expect("aligned");
    assert_eq!((op, args.divisor, args.hosts, args.bytes, args.to), (ReduceOp::Avg, 4, 2, 40, 5));
    let (op, args) = sum(DType::F32, ReduceOp::Avg).args(&layout).expect("aligned");
    assert_eq!((op, &args.factor[..3]), (ReduceOp::PremulSum, &[0.75, 0.25, 1.0][..]));
    assert_eq!(size_of::<SumPartials>(), 40 + 8 * MOST_HOSTS);
    let unaligned = Sum { from: 33, ..sum(DType::F32, ReduceOp::Sum) };
    assert!(unaligned.args(&layout).is_err());
}
