//! Ranks of several nodes, emulated step by step without threads.
#![allow(unsafe_code, reason = "plays kernels on buffers of the test")]

use super::super::check::check;
use super::super::levels::{ReduceDtype, TwoLevelOps};
use super::super::rules::Rules;
use super::super::step::{Bases, Place, Program, ProgramMemory, RailOp, Step};
use super::super::{MessageLengths, Planning};
use crate::coll::call::{Call, CallSpec, Collective, Span};
use crate::coll::cost::network::RailThresholds;
use crate::dtype::{DType, ReduceOp, SumOrder};
use crate::kernels::cpu::{self, InputElements, WriteMode};
use crate::node_map::{NodeMap, RankLocation};
use crate::rank::Rank;
use std::collections::VecDeque;

/// The choices that the ranks of a group share.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    pub(super) rules: &'static Rules,
    pub(super) partials: ReduceDtype,
    pub(super) thresholds: RailThresholds,
}

impl Choice {
    pub(super) const CPU: Self = Self {
        rules: &Rules::CPU,
        partials: ReduceDtype::Tensor,
        thresholds: RailThresholds::DEFAULT,
    };
    pub(super) const CUDA: Self =
        Self { rules: &Rules::CUDA, thresholds: RailThresholds::DEFAULT_CUDA, ..Self::CPU };

    pub(super) fn plan(
        &self,
        call: &CallSpec,
        map: &NodeMap,
        me: usize,
        told: Option<&MessageLengths>,
    ) -> Program {
        let Self { rules, partials, thresholds } = *self;
        Planning { map, me: Rank(me as u32), reduce_dtype: partials, thresholds, rules }
            .plan(call, told)
    }
}

pub(crate) fn layout(nodes: &[u8]) -> NodeMap {
    let place = |node: &u8| RankLocation::on(&format!("node{node}"));
    NodeMap::of(&nodes.iter().map(place).collect::<Vec<_>>())
}

pub(super) fn read(span: Span) -> Vec<u8> {
    if span.bytes == 0 {
        return vec![];
    }
    // SAFETY: the spans of plans and of rails belong to live buffers of this length.
    unsafe { std::slice::from_raw_parts(span.addr as *const u8, span.bytes) }.to_vec()
}

pub(crate) fn write(bytes: &[u8], to: Span) {
    assert_eq!(bytes.len(), to.bytes, "lengths fit");
    // SAFETY: as above; no other code has a reference.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.addr as *mut u8, bytes.len()) }
}

pub(super) fn reduced(op: ReduceOp, dtype: DType, inputs: &[Vec<u8>], factors: &[f64]) -> Vec<u8> {
    let mut output = vec![0; inputs[0].len()];
    let source = |(data, &factor): (&Vec<u8>, &f64)| InputElements { ptr: data.as_ptr(), factor };
    let sources: Vec<InputElements> = inputs.iter().zip(factors).map(source).collect();
    // SAFETY: all buffers are of one length, a multiple of the element's size.
    unsafe {
        cpu::reduce(
            op,
            dtype,
            output.as_mut_ptr(),
            &sources,
            output.len() / dtype.size(),
            WriteMode::Cached,
        )
    };
    output
}

/// Returns the result of a `Combine`.
fn combined(
    op: ReduceOp,
    partial: DType,
    dtype: DType,
    layout: &NodeMap,
    partials: &[Vec<u8>],
) -> Vec<u8> {
    let levels = TwoLevelOps::of(op, dtype, layout);
    let source = |(node, data): (usize, &Vec<u8>)| InputElements {
        ptr: data.as_ptr(),
        factor: levels.factor(node, layout),
    };
    let sources: Vec<InputElements> = partials.iter().enumerate().map(source).collect();
    let mut output = vec![0; partials[0].len()];
    let count = output.len() / partial.size();
    // SAFETY: all buffers are of one length, a multiple of the element's size.
    unsafe {
        cpu::reduce_partials(
            SumOrder::Rank,
            levels.outer,
            partial,
            output.as_mut_ptr(),
            &sources,
            count,
            levels.divisor,
        )
    };
    output
}

/// Runs one collective of the ranks of a node; `calls[r]` is the call of local rank `r`.
fn inside(calls: &[&Call]) {
    let n = calls.len();
    for call in calls {
        call.validate(
            Rank(calls.iter().position(|other| std::ptr::eq(*other, *call)).expect("there") as u32),
            n,
        )
        .expect("valid");
    }
    let given: Vec<Vec<Vec<u8>>> =
        calls.iter().map(|call| call.inputs.iter().map(|&span| read(span)).collect()).collect();
    let (op, dtype, reduce_op) = (calls[0].op, calls[0].dtype, calls[0].reduce_op);
    assert!(
        calls.iter().all(|call| (call.op, call.dtype, call.reduce_op) == (op, dtype, reduce_op)),
        "all run the same"
    );
    let factors: Vec<f64> = calls.iter().map(|call| call.factor).collect();
    for (me, call) in calls.iter().enumerate() {
        for (at, &output) in call.outputs.iter().enumerate() {
            let bytes = match op {
                Collective::AllGather => given[at][0].clone(),
                Collective::AllToAll => given[at][me].clone(),
                Collective::Broadcast => given[call.root.index()][0].clone(),
                Collective::ReduceScatter => reduced(
                    reduce_op,
                    dtype,
                    &given.iter().map(|inputs| inputs[me].clone()).collect::<Vec<_>>(),
                    &factors,
                ),
                Collective::Barrier
                | Collective::AllReduce
                | Collective::Reduce
                | Collective::Gather
                | Collective::Scatter
                | Collective::AllReduceAddRmsNorm => {
                    panic!("{op:?} is in no plan")
                }
            };
            write(&bytes, output);
        }
    }
}

/// Returns the result of a `Cast`.
fn cast(given: &[u8], bytes: usize, dtype: DType, widens: bool) -> Vec<u8> {
    let mut output = vec![0; bytes];
    let count = if widens { given.len() } else { bytes } / dtype.size();
    assert_eq!((given.len() + bytes, count > 0), (count * (4 + dtype.size()), true), "lengths fit");
    let kernel = if widens { cpu::widen } else { cpu::narrow };
    // SAFETY: buffers of `count` elements each.
    unsafe { kernel(dtype, output.as_mut_ptr(), given.as_ptr(), count) }
    output
}

/// Runs the programs of `calls`, one per rank, with the chosen chunks and again with many chunks. A
/// transfer may run as soon as all ranks have started it, or when a rank waits for it; the test
/// tries both.
pub(super) fn run_calls(layout: &NodeMap, choice: Choice, calls: &[CallSpec<'_>]) {
    let outputs = || {
        calls
            .iter()
            .flat_map(|call| call.outputs.iter().map(|&span| (span, read(span))))
            .collect::<Vec<_>>()
    };
    let before = outputs();
    // Copies of the inputs, to restore those that a call overwrites in place.
    let inputs: Vec<(Span, Vec<u8>)> =
        calls.iter().flat_map(|call| call.inputs.iter().map(|&span| (span, read(span)))).collect();
    let longest = inputs.iter().map(|(span, _)| span.bytes).max().unwrap_or(0);
    let piece = (longest / 20).next_multiple_of(64).max(64);
    Ranks::new(layout, choice, calls).run(true);
    let once = outputs();
    for late in [false, true] {
        before.iter().chain(&inputs).for_each(|(span, bytes)| write(bytes, *span));
        let thresholds =
            RailThresholds { chunk_bytes: piece, gather_bytes: 0, ..choice.thresholds };
        Ranks::new(layout, Choice { thresholds, ..choice }, calls).run(late);
        assert!(outputs() == once, "in many chunks, late = {late}");
    }
}

/// The transfers that the nodes of one rail have started.
#[derive(Clone, Default)]
struct Rail {
    rounds: Vec<Vec<Option<RailOp<Span>>>>,
    done: Vec<bool>,
}

struct RankState {
    steps: VecDeque<Step>,
    bases: Bases,
    partial: DType,
    /// Keeps the memory to which `bases` points.
    _memory: [Vec<u128>; 2],
    /// Number of transfers that the rank has started. `open` holds the transfers whose `Wait`
    /// follows; `running` is the transfer of the `Run` that is the rank's next step.
    started: usize,
    open: VecDeque<usize>,
    running: Option<usize>,
}

struct Ranks<'a> {
    layout: &'a NodeMap,
    choice: Choice,
    calls: &'a [CallSpec<'a>],
    ranks: Vec<RankState>,
    rails: Vec<Rail>,
    /// Messages of exchanges, from one rank to another.
    sent: Vec<Vec<Option<Vec<u8>>>>,
}

impl<'a> Ranks<'a> {
    fn new(layout: &'a NodeMap, choice: Choice, calls: &'a [CallSpec<'a>]) -> Self {
        let n = calls.len();
        let told =
            (calls[0].op == Collective::AllToAll && choice.rules.carriers).then(|| lengths(calls));
        let state = |(rank, call): (usize, &CallSpec)| {
            call.validate(Rank(rank as u32), n).expect("valid");
            let program = choice.plan(call, layout, rank, told.as_ref());
            check(&program, call, layout.node_of(Rank(rank as u32)))
                .unwrap_or_else(|rule| panic!("rank {rank}: {rule}"));
            let has =
                |kind: fn(&Step) -> bool| program.steps.iter().filter(|step| kind(step)).count();
            let transfers = has(|step| matches!(step, Step::Start(_) | Step::Run(_)));
            let agrees = usize::from(
                choice.rules.agrees
                    && !matches!(call.op, Collective::AllToAll | Collective::Barrier)
                    && call.longest() > 0,
            );
            assert!(
                has(|step| matches!(step, Step::Agree)) == agrees || transfers == 0,
                "agrees once"
            );
            let memory = [program.temp, program.aside]
                .map(|bytes| vec![u128::MAX - 0xee; bytes.div_ceil(16)]);
            let bases = Bases { temp: memory[0].as_ptr().addr(), aside: memory[1].as_ptr().addr() };
            let (partial, open) = (program.partial, VecDeque::new());
            if !choice.rules.any_memory {
                assert!(program.steps.iter().all(is_apart), "transfers use memory of their own");
            }
            RankState {
                steps: program.steps.into(),
                bases,
                partial,
                _memory: memory,
                started: 0,
                open,
                running: None,
            }
        };
        let ranks = calls.iter().enumerate().map(state).collect();
        Self {
            layout,
            choice,
            calls,
            ranks,
            rails: vec![Rail::default(); layout.num_rails()],
            sent: vec![vec![None; n]; n],
        }
    }

    /// Runs all programs to the end; if `late`, a transfer runs only at its `Wait`.
    fn run(mut self, late: bool) {
        while self.ranks.iter().any(|rank| !rank.steps.is_empty()) {
            let moved = (0..self.ranks.len()).filter(|&rank| self.step(rank, late)).count();
            assert!(
                moved > 0,
                "programs wait for each other: {:?}",
                self.ranks.iter().map(|rank| rank.steps.front()).collect::<Vec<_>>()
            );
        }
        assert!(
            self.rails.iter().all(|rail| rail.done.iter().all(|&done| done)),
            "all transfers have ended"
        );
    }

    /// Runs the next step of `rank`, unless the step waits for another rank.
    fn step(&mut self, rank: usize, late: bool) -> bool {
        let (me, call) = (Rank(rank as u32), &self.calls[rank]);
        let (node, local) = (self.layout.node_of(me), self.layout.local_rank(me));
        let state = &mut self.ranks[rank];
        let bases = state.bases;
        let at = |place: &Place| place.at(&bases);
        match state.steps.front().cloned() {
            None => return false,
            Some(Step::Agree) => assert_eq!(state.started, 0, "nothing was on the wire before"),
            Some(Step::Copy { from, to }) => write(&read(at(&from)), at(&to)),
            Some(Step::Combine { from, to }) => {
                let from: Vec<Span> = from.iter().map(at).collect();
                let strides: Vec<usize> =
                    from.windows(2).map(|two| two[1].addr.wrapping_sub(two[0].addr)).collect();
                let even = from[0].addr.is_multiple_of(16)
                    && strides
                        .iter()
                        .all(|&stride| stride == strides[0] && stride.is_multiple_of(16));
                assert!(
                    even || !self.choice.rules.any_memory,
                    "partial results are evenly spaced on GPUs"
                );
                let partials: Vec<Vec<u8>> = from.into_iter().map(read).collect();
                let state = &self.ranks[rank];
                write(
                    &combined(call.reduce_op, state.partial, call.dtype, self.layout, &partials),
                    at(&to),
                );
            }
            Some(Step::Cast { from, to, widens }) => {
                write(&cast(&read(at(&from)), to.bytes(), call.dtype, widens), at(&to))
            }
            Some(Step::Exchange { give, take }) => {
                let (give, take): (Vec<Span>, Vec<Span>) =
                    (give.iter().map(at).collect(), take.iter().map(at).collect());
                for (to, &span) in give.iter().enumerate().filter(|(_, span)| span.bytes > 0) {
                    self.sent[rank][to].get_or_insert_with(|| read(span));
                }
                let mut taken = take.iter().enumerate().filter(|(_, span)| span.bytes > 0);
                if taken.clone().any(|(from, _)| self.sent[from][rank].is_none()) {
                    // The rank's peers have not reached this step yet.
                    return false;
                }
                taken.by_ref().for_each(|(from, &span)| {
                    write(self.sent[from][rank].as_ref().expect("sent"), span)
                });
            }
            Some(Step::Local(_)) => return self.local(node, local),
            Some(Step::Start(transfer)) => {
                let round = self.start(rank, node, local, &transfer);
                self.ranks[rank].open.push_back(round);
                if !late {
                    self.end(local, round);
                }
            }
            Some(Step::Run(transfer)) => {
                let round =
                    state.running.unwrap_or_else(|| self.start(rank, node, local, &transfer));
                self.ranks[rank].running = Some(round);
                if !self.end(local, round) {
                    return false;
                }
                self.ranks[rank].running = None;
            }
            Some(Step::Wait) => {
                let round = *state.open.front().expect("a transfer was started");
                if !self.end(local, round) {
                    return false;
                }
                self.ranks[rank].open.pop_front();
            }
        }
        self.ranks[rank].steps.pop_front();
        true
    }

    /// Runs the next step of all ranks of `node` if it is a step of intra-node collectives; only
    /// the first rank does this.
    fn local(&mut self, node: usize, local: usize) -> bool {
        let members: Vec<usize> =
            self.layout.ranks_of(node).iter().map(|rank| rank.index()).collect();
        let calls = |&member: &usize| match self.ranks[member].steps.front() {
            Some(Step::Local(calls)) => Some(
                calls
                    .iter()
                    .map(|inner| inner.call(self.calls[member].factor, &self.ranks[member].bases))
                    .collect(),
            ),
            _ => None,
        };
        let all: Vec<Vec<Call>> = members.iter().filter_map(calls).collect();
        if local != 0 || all.len() < members.len() {
            return false;
        }
        assert!(all.iter().all(|calls| calls.len() == all[0].len()), "as many calls");
        (0..all[0].len())
            .for_each(|at| inside(&all.iter().map(|calls| &calls[at]).collect::<Vec<_>>()));
        members.iter().for_each(|&member| drop(self.ranks[member].steps.pop_front()));
        true
    }

    /// Notes that `rank` has started `transfer`; returns its number on the rail.
    fn start(&mut self, rank: usize, node: usize, rail: usize, transfer: &RailOp<Place>) -> usize {
        let (state, rail) = (&mut self.ranks[rank], &mut self.rails[rail]);
        let round = state.started;
        state.started += 1;
        if rail.rounds.len() <= round {
            rail.rounds.push(vec![None; self.layout.num_nodes()]);
            rail.done.push(false);
        }
        rail.rounds[round][node] = Some(transfer.map(|place| place.at(&state.bases)));
        round
    }

    /// Runs transfer `round` of `rail` unless it has run; returns true if all nodes have started
    /// it.
    fn end(&mut self, rail: usize, round: usize) -> bool {
        let rail = &mut self.rails[rail];
        let all: Vec<RailOp<Span>> = rail.rounds[round].iter().flatten().cloned().collect();
        if all.len() < self.layout.num_nodes() {
            return false;
        }
        if !std::mem::replace(&mut rail.done[round], true) {
            transferred(&all);
        }
        true
    }
}

/// Returns true if `step` is not a transfer, or if its transfer touches only temporary memory.
fn is_apart(step: &Step) -> bool {
    match step {
        Step::Start(transfer) | Step::Run(transfer) => match transfer {
            RailOp::AllGather { from, to } | RailOp::AllToAll { from, to, .. } => [from, to]
                .iter()
                .all(|place| place.memory == ProgramMemory::Temp || place.bytes() == 0),
            RailOp::Broadcast { at, .. } => at.memory == ProgramMemory::Temp,
        },
        Step::Local(_) | Step::Agree | Step::Wait | Step::Exchange { .. } => true,
        Step::Combine { .. } | Step::Cast { .. } | Step::Copy { .. } => true,
    }
}

/// The lengths that ranks have sent to each other.
fn lengths(calls: &[CallSpec<'_>]) -> MessageLengths {
    let sent: Vec<usize> =
        calls.iter().flat_map(|call| call.inputs.iter().map(|span| span.bytes)).collect();
    if sent.iter().all(|&bytes| bytes == sent[0]) {
        MessageLengths::Even(sent[0])
    } else {
        MessageLengths::Each { sent, n: calls.len() }
    }
}

/// Returns the bytes that `node` sends to each of `n` nodes, and where it receives theirs.
pub(crate) fn moved(transfer: &RailOp<Span>, node: usize, n: usize) -> (Vec<Vec<u8>>, Vec<Span>) {
    let pieces = |whole: Span, lengths: &[usize]| -> Vec<Span> {
        assert_eq!(whole.bytes, lengths.iter().sum::<usize>(), "all of it");
        let start = |at: usize| whole.addr + lengths[..at].iter().sum::<usize>();
        (0..n).map(|at| Span { addr: start(at), bytes: lengths[at] }).collect()
    };
    match transfer {
        RailOp::AllGather { from, to } => (vec![read(*from); n], pieces(*to, &vec![from.bytes; n])),
        RailOp::AllToAll { from, sent, to, received } => {
            (pieces(*from, sent).into_iter().map(read).collect(), pieces(*to, received))
        }
        RailOp::Broadcast { root, at } => {
            let sent = if node == *root { read(*at) } else { vec![] };
            let mut received = vec![Span { bytes: 0, ..*at }; n];
            received[*root] = *at;
            (vec![sent; n], received)
        }
    }
}

/// Runs one transfer of a rail.
fn transferred(all: &[RailOp<Span>]) {
    let kind = std::mem::discriminant(&all[0]);
    assert!(all.iter().all(|other| std::mem::discriminant(other) == kind), "{all:?}");
    let n = all.len();
    let moved: Vec<_> = (0..n).map(|node| moved(&all[node], node, n)).collect();
    for (me, (_, received)) in moved.iter().enumerate() {
        for ((sent, _), to) in moved.iter().zip(received) {
            write(&sent[me], *to);
        }
    }
}
