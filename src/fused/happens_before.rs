//! Checks that whole programs of fused products have no races, over all ranks and both streams of
//! each. Vector clocks find any two accesses of which one writes and neither happens before the
//! other. Signals pair up by their order, so a result that holds for one run holds for all.
//!
//! L. Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", 1978; C. Fidge,
//! "Timestamps in Message-Passing Systems That Preserve the Partial Ordering", 1988.

use super::schedule::{self, CallStream, PadChannel, StreamStep};
use super::workspace::{CallStart, Workspace, WorkspaceSlot};
use super::{DeviceModel, MatmulShape};
use std::collections::HashMap;
use std::ops::Range;

const H200: DeviceModel =
    DeviceModel { processors: 132, flops_per_us: 6e6, link: 370.0, memory: 3500.0 };
const MIB: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelOp {
    Gather,
    /// A reduce-scatter that fetches this many parts.
    Scatter(usize),
}

/// An operation of a program. All ranks run the same operations in the order of their callers'
/// streams.
#[derive(Clone, Copy, Debug)]
enum Item {
    Eager(ModelOp),
    /// A call that fails on all ranks, at the first step from this index on that may fail; a step
    /// that only signals cannot fail.
    Failed(ModelOp, usize),
    /// Replays the graph with this number.
    Replay(usize),
    /// Records a call into a further graph, which is not replayed.
    Record(ModelOp),
}

/// A call of one rank.
#[derive(Clone)]
struct ModelCall {
    op: ModelOp,
    offset: usize,
    steps: Vec<StreamStep>,
}

/// The memory that an access touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ModelPlace {
    /// The piece at this offset of this rank's workspace.
    Piece(usize, usize),
    /// The rows that this rank received in this call from this other rank.
    Local(usize, usize, usize),
}

#[derive(Clone, Debug)]
struct Access {
    write: bool,
    /// The ranks whose parts the access touches; a shard may lie where any part lies.
    parts: Range<usize>,
    timeline: usize,
    time: usize,
    what: String,
}

/// The progress of one stream in one call: its steps, the next one, and its vector clock over all
/// timelines.
struct Cursor {
    timeline: usize,
    steps: Vec<StreamStep>,
    next: usize,
    /// How many peers the current barrier has signalled, and from how many it has received a
    /// signal.
    told: usize,
    heard: usize,
    clock: Vec<usize>,
}

impl Cursor {
    /// Makes the cursor of a call's stream that has seen `clock`. The copying stream of each call
    /// is a stream of its own, because a graph has no stream.
    fn new(
        calls: &[Vec<ModelCall>],
        number: usize,
        rank: usize,
        stream: CallStream,
        clock: &[usize],
    ) -> Self {
        let call = &calls[number];
        let timeline = 2 * (number * call.len() + rank) + stream as usize;
        let steps =
            call[rank].steps.iter().filter(|step| step.stream() == stream).cloned().collect();
        let mut clock = clock.to_vec();
        clock.resize(2 * calls.len() * call.len(), 0);
        Self { timeline, steps, next: 0, told: 0, heard: 0, clock }
    }

    fn is_done(&self) -> bool {
        self.next == self.steps.len()
    }
}

/// A rank that is in the call with this number.
struct ModelRank {
    number: usize,
    streams: [Cursor; 2],
    marks: HashMap<usize, Vec<usize>>,
}

impl ModelRank {
    fn new(calls: &[Vec<ModelCall>], number: usize, rank: usize, clock: &[usize]) -> Self {
        let stream = |stream, clock| Cursor::new(calls, number, rank, stream, clock);
        Self {
            number,
            streams: [stream(CallStream::Caller, clock), stream(CallStream::Copying, &[])],
            marks: HashMap::new(),
        }
    }
}

struct Run<'a> {
    n: usize,
    calls: &'a [Vec<ModelCall>],
    words: HashMap<(usize, usize, PadChannel), (bool, Vec<usize>)>,
    accesses: HashMap<ModelPlace, Vec<Access>>,
}

fn join(clock: &mut [usize], other: &[usize]) {
    clock.iter_mut().zip(other).for_each(|(own, &other)| *own = (*own).max(other));
}

impl Run<'_> {
    /// Signals a peer if its word is clear.
    fn put(&mut self, from: usize, to: usize, channel: PadChannel, clock: &mut [usize]) -> bool {
        let (set, last) = self.words.entry((from, to, channel)).or_default();
        if *set {
            return false;
        }
        join(clock, last);
        (*set, *last) = (true, clock.to_vec());
        true
    }

    fn take(&mut self, from: usize, to: usize, channel: PadChannel, clock: &mut [usize]) -> bool {
        let (set, last) = self.words.entry((from, to, channel)).or_default();
        if !*set {
            return false;
        }
        join(clock, last);
        (*set, *last) = (false, clock.to_vec());
        true
    }

    fn touch(
        &mut self,
        place: ModelPlace,
        write: bool,
        parts: Range<usize>,
        cursor: &Cursor,
        what: &str,
    ) -> Result<(), String> {
        let before = self.accesses.entry(place).or_default();
        let overlap =
            |access: &&Access| access.parts.start < parts.end && parts.start < access.parts.end;
        let unordered = |access: &&Access| cursor.clock[access.timeline] < access.time;
        if let Some(other) =
            before.iter().filter(|access| write || access.write).filter(overlap).find(unordered)
        {
            return Err(format!("{what} and {} in {place:?}", other.what));
        }
        let time = cursor.clock[cursor.timeline];
        before.push(Access { write, parts, timeline: cursor.timeline, time, what: what.into() });
        Ok(())
    }

    /// Runs a stream's next step; returns false if it must wait.
    fn step(
        &mut self,
        rank: usize,
        number: usize,
        cursor: &mut Cursor,
        marks: &mut HashMap<usize, Vec<usize>>,
    ) -> Result<bool, String> {
        let Some(step) = cursor.steps.get(cursor.next).cloned() else { return Ok(false) };
        cursor.clock[cursor.timeline] += 1;
        let ModelCall { op, offset, .. } = self.calls[number][rank];
        let (n, all) = (self.n, 0..self.n);
        let what = format!("{step:?} of rank {rank} in call {number}");
        let local = |from| ModelPlace::Local(rank, number, from);
        match step {
            StreamStep::Mark(_, mark) => drop(marks.insert(mark, cursor.clock.clone())),
            StreamStep::After(_, mark) => match marks.get(&mark) {
                Some(clock) => join(&mut cursor.clock, clock),
                None => return Ok(false),
            },
            StreamStep::Barrier(_, channel) => {
                let peers: Vec<usize> = (0..n).filter(|&peer| peer != rank).collect();
                while cursor.told < peers.len() {
                    if !self.put(rank, peers[cursor.told], channel, &mut cursor.clock) {
                        return Ok(false);
                    }
                    cursor.told += 1;
                }
                while cursor.heard < peers.len() {
                    if !self.take(peers[cursor.heard], rank, channel, &mut cursor.clock) {
                        return Ok(false);
                    }
                    cursor.heard += 1;
                }
                (cursor.told, cursor.heard) = (0, 0);
            }
            StreamStep::Signal(to) => {
                if !self.put(rank, to, PadChannel::Part, &mut cursor.clock) {
                    return Ok(false);
                }
            }
            StreamStep::Wait(from) => {
                if !self.take(from, rank, PadChannel::Part, &mut cursor.clock) {
                    return Ok(false);
                }
            }
            StreamStep::Share => {
                self.touch(ModelPlace::Piece(rank, offset), true, all, cursor, &what)?
            }
            StreamStep::Fetch(from) => {
                let parts = if op == ModelOp::Gather { all.clone() } else { rank..rank + 1 };
                self.touch(ModelPlace::Piece(from, offset), false, parts, cursor, &what)?;
                self.touch(local(from), true, all, cursor, &what)?;
            }
            StreamStep::OwnRows(_) => self.touch(local(rank), true, all, cursor, &what)?,
            StreamStep::Multiply(ranks) if op == ModelOp::Gather => {
                for from in ranks.filter(|&from| from != rank) {
                    assert!(
                        self.accesses.contains_key(&local(from)),
                        "{what} before the shard came"
                    );
                    self.touch(local(from), false, all.clone(), cursor, &what)?;
                }
            }
            StreamStep::Multiply(ranks) => {
                self.touch(ModelPlace::Piece(rank, offset), true, ranks, cursor, &what)?
            }
            StreamStep::Sum => {
                for from in 0..n {
                    let fetched = self.accesses.contains_key(&local(from));
                    let (place, parts) = if fetched {
                        (local(from), all.clone())
                    } else {
                        (ModelPlace::Piece(from, offset), rank..rank + 1)
                    };
                    self.touch(place, false, parts, cursor, &what)?;
                }
            }
        }
        cursor.next += 1;
        Ok(true)
    }

    /// Runs every rank's calls until no rank can make progress, and reports the first pair of
    /// unordered accesses.
    fn check(mut self) -> Result<(), String> {
        let calls = self.calls;
        let mut ranks: Vec<ModelRank> =
            (0..self.n).map(|rank| ModelRank::new(calls, 0, rank, &[])).collect();
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for (number, rank) in ranks.iter_mut().enumerate() {
                for stream in &mut rank.streams {
                    while self.step(number, rank.number, stream, &mut rank.marks)? {
                        moved = true;
                    }
                }
                if rank.streams.iter().all(Cursor::is_done) && rank.number + 1 < calls.len() {
                    let [mut clock, copied] =
                        rank.streams.each_ref().map(|stream| stream.clock.clone());
                    join(&mut clock, &copied);
                    *rank = ModelRank::new(calls, rank.number + 1, number, &clock);
                    moved = true;
                }
            }
        }
        let stuck = ranks.iter().find(|rank| {
            rank.number + 1 < calls.len() || !rank.streams.iter().all(Cursor::is_done)
        });
        stuck.map_or(Ok(()), |rank| Err(format!("stuck in call {}", rank.number)))
    }
}

/// Maps the slot that the workspace assigns to a call to the slot that the call uses: the identity,
/// or a deliberate error that the check must find.
type Turns = fn(WorkspaceSlot) -> WorkspaceSlot;

/// Runs a program on `n` ranks with previously recorded graphs and a workspace for `bytes`.
fn run(
    n: usize,
    bytes: usize,
    graphs: &[&[ModelOp]],
    program: &[Item],
    turns: Turns,
) -> Result<(), String> {
    let mut workspaces = vec![Workspace::new(false); n];
    let mut calls = |op: ModelOp, capture: u64, failed: Option<usize>| -> Vec<ModelCall> {
        let each = workspaces.iter_mut().enumerate().map(|(rank, workspace)| {
            let turn = loop {
                match workspace.begin("test", bytes, capture).expect("served") {
                    CallStart::Turn(turn) => break turns(turn),
                    CallStart::Make(memory) => workspace.made(&memory),
                }
            };
            let mut steps = match op {
                ModelOp::Gather => {
                    let plan = super::gather(
                        n,
                        rank,
                        &MatmulShape { rows: 512, columns: 1024, depth: 8192, element: 2 },
                        &H200,
                    );
                    schedule::gather(n, rank, &plan, turn.entry, rank % 2 == 0)
                }
                ModelOp::Scatter(pulled) => schedule::scatter(n, rank, pulled, turn.entry),
            };
            if let Some(from) = failed {
                workspace.fail();
                let may_fail = |step: &StreamStep| {
                    matches!(
                        step,
                        StreamStep::Share
                            | StreamStep::Fetch(_)
                            | StreamStep::OwnRows(_)
                            | StreamStep::Multiply(_)
                            | StreamStep::Sum
                    )
                };
                let cut =
                    steps.iter().enumerate().position(|(at, step)| at >= from && may_fail(step));
                steps.truncate(cut.unwrap_or(steps.len()));
            }
            ModelCall { op, offset: turn.offset, steps }
        });
        each.collect()
    };
    // Creates the memory now, because a capture may not create it.
    let mut all = vec![calls(ModelOp::Gather, 0, None)];
    let graphs: Vec<Vec<Vec<ModelCall>>> = graphs
        .iter()
        .enumerate()
        .map(|(graph, ops)| ops.iter().map(|&op| calls(op, graph as u64 + 1, None)).collect())
        .collect();
    let mut captures = graphs.len() as u64;
    for &item in program {
        match item {
            Item::Eager(op) => all.push(calls(op, 0, None)),
            Item::Failed(op, from) => all.push(calls(op, 0, Some(from))),
            Item::Replay(graph) => all.extend(graphs[graph].iter().cloned()),
            Item::Record(op) => {
                captures += 1;
                calls(op, captures, None);
            }
        }
    }
    Run { n, calls: &all, words: HashMap::new(), accesses: HashMap::new() }.check()
}

const GRAPHS: [&[ModelOp]; 3] = [
    &[ModelOp::Gather],
    &[ModelOp::Scatter(1), ModelOp::Gather, ModelOp::Gather],
    &[ModelOp::Scatter(0)],
];

fn programs(items: &[Item], length: usize) -> Vec<Vec<Item>> {
    let mut programs = vec![Vec::new()];
    for _ in 0..length {
        programs = programs
            .iter()
            .flat_map(|program| {
                items.iter().map(move |&item| [program.as_slice(), &[item]].concat())
            })
            .collect();
    }
    programs
}

fn as_it_is(turn: WorkspaceSlot) -> WorkspaceSlot {
    turn
}

#[test]
fn no_program_has_a_race() {
    use Item::{Eager, Failed, Replay};
    let items = [
        Eager(ModelOp::Gather),
        Eager(ModelOp::Scatter(0)),
        Eager(ModelOp::Scatter(1)),
        Failed(ModelOp::Gather, 0),
        Failed(ModelOp::Scatter(1), 9),
        Replay(0),
        Replay(1),
        Replay(2),
    ];
    for (n, length) in [(2, 4), (3, 3), (4, 2)] {
        for program in programs(&items, length) {
            for bytes in [MIB, 65 * MIB] {
                run(n, bytes, &GRAPHS, &program, as_it_is)
                    .unwrap_or_else(|race| panic!("{race}: {n} ranks, {bytes} bytes, {program:?}"));
            }
        }
    }
}

#[test]
fn a_call_may_fail_at_any_step() {
    for op in [ModelOp::Gather, ModelOp::Scatter(0), ModelOp::Scatter(2)] {
        for from in 0..24 {
            for rest in
                programs(&[Item::Eager(ModelOp::Gather), Item::Eager(ModelOp::Scatter(1))], 3)
            {
                let program =
                    [&[Item::Eager(ModelOp::Scatter(0)), Item::Failed(op, from)], rest.as_slice()]
                        .concat();
                run(3, MIB, &[], &program, as_it_is)
                    .unwrap_or_else(|race| panic!("{race}: {program:?}"));
            }
        }
    }
}

#[test]
fn a_recorded_call_leaves_the_barrier_after_a_failure_to_the_next_eager_call() {
    use Item::{Eager, Failed, Record};
    for op in [ModelOp::Gather, ModelOp::Scatter(1)] {
        for rest in programs(&[Eager(ModelOp::Gather), Eager(op), Record(ModelOp::Scatter(0))], 3) {
            let program = [&[Eager(op), Eager(op), Failed(op, 0)], rest.as_slice()].concat();
            run(2, MIB, &[], &program, as_it_is)
                .unwrap_or_else(|race| panic!("{race}: {program:?}"));
        }
    }
}

#[test]
fn wrong_turns_are_found() {
    use Item::{Eager, Failed, Replay};
    let race =
        |program: &[Item], turns: Turns| run(2, MIB, &GRAPHS, program, turns).expect_err("a race");
    // A single piece without a barrier.
    let found = race(&[Eager(ModelOp::Gather)], |turn| WorkspaceSlot { offset: 0, ..turn });
    assert!(found.contains("Share of rank") && found.contains("Fetch"), "{found}");
    race(&[Eager(ModelOp::Scatter(1)), Eager(ModelOp::Scatter(0))], |turn| WorkspaceSlot {
        offset: 0,
        ..turn
    });
    let unguarded: Turns = |turn| WorkspaceSlot { entry: false, ..turn };
    // A graph replayed after itself.
    race(&[Replay(0), Replay(0)], unguarded);
    // A peer from which this rank received no signal in a failed call may still read the data that
    // the previous call shared.
    race(&[Eager(ModelOp::Gather), Failed(ModelOp::Gather, 0), Eager(ModelOp::Gather)], unguarded);
}
