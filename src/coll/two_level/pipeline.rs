//! The order of the steps of a long call, which moves in chunks: while the transfers of one chunk
//! are on the wire, the rank works on neighbouring chunks.
//!
//! A chunk has stages: the steps up to a transfer, then the steps that need its result, up to the
//! next transfer, and so on.

use super::planner::{Planner, Room};
use super::step::{ProgramMemory, Step};

/// The stages of one chunk, and the memory that they need.
struct Chunk {
    stages: Vec<Vec<Step>>,
    needs: Room,
}

impl Planner<'_> {
    /// Ends a stage of a chunk. The next stage starts when the transfers of the ended stage are
    /// complete.
    pub(super) fn next_stage(&mut self) {
        let stage = std::mem::take(&mut self.steps);
        let started = stage.iter().filter(|step| matches!(step, Step::Start(_))).count();
        self.steps.resize(started, Step::Wait);
        self.stages.push(stage);
    }

    /// Plans a call of `count` chunks; `chunk` plans one of them. All chunks have the same number
    /// of stages. At any time one chunk is in each stage, and these chunks use separate memory.
    pub(super) fn chunked(&mut self, count: usize, chunk: impl Fn(&mut Self, usize)) {
        let (mut steps, start) = (std::mem::take(&mut self.steps), self.used);
        let mut one = |number: usize| {
            self.used = start;
            chunk(self, number);
            self.next_stage();
            Chunk {
                stages: std::mem::take(&mut self.stages),
                needs: self.used.each(start, |used, start| used - start),
            }
        };
        let mut chunks: Vec<Chunk> = (0..count).map(&mut one).collect();
        // The last stage starts no transfer, so it leaves no wait.
        self.steps.clear();
        let stages = chunks.iter().map(|chunk| chunk.stages.len()).max().unwrap_or(1);
        let apart = chunks.iter().fold(Room::default(), |most, chunk| most.most(chunk.needs));
        for (number, chunk) in chunks.iter_mut().enumerate() {
            let by = apart.each(start, |apart, _| number % stages * apart);
            chunk.stages.iter_mut().flatten().for_each(|step| shift(step, start, by));
            let end =
                by.each(chunk.needs, |by, needs| by + needs).each(start, |end, start| start + end);
            self.most = self.most.most(end);
        }
        self.used = self.most;
        steps.extend(pipeline(chunks.into_iter().map(|chunk| chunk.stages).collect()));
        self.steps = steps;
    }
}

/// Adds `by` to the addresses in `step` that are in the program's memory, at `start` or behind it.
fn shift(step: &mut Step, start: Room, by: Room) {
    for place in step.places_mut() {
        let (start, by) = match place.memory {
            ProgramMemory::Given => continue,
            ProgramMemory::Temp => (start.temp, by.temp),
            ProgramMemory::Aside => (start.aside, by.aside),
        };
        if place.span.addr >= start {
            place.span.addr += by;
        }
    }
}

/// Returns the steps of all `chunks`, which are lists of stages. Stage `s` of chunk `c` runs at
/// time `c + s`; at equal times, newer chunks run first. So waits are in the order in which the
/// transfers start.
fn pipeline(mut chunks: Vec<Vec<Vec<Step>>>) -> Vec<Step> {
    let stages = chunks.iter().map(Vec::len).max().unwrap_or(0);
    let (count, mut steps) = (chunks.len(), Vec::new());
    for time in 0..count + stages {
        for stage in 0..stages {
            let chunk = time.checked_sub(stage).and_then(|chunk| chunks.get_mut(chunk));
            if let Some(stage) = chunk.and_then(|chunk| chunk.get_mut(stage)) {
                steps.append(stage);
            }
        }
    }
    if count == 1 { together(steps) } else { steps }
}

/// Returns `steps` with each transfer and a wait directly behind it merged into one step.
fn together(steps: Vec<Step>) -> Vec<Step> {
    let mut joined: Vec<Step> = Vec::new();
    for step in steps {
        match (joined.pop(), step) {
            (Some(Step::Start(transfer)), Step::Wait) => joined.push(Step::Run(transfer)),
            (before, step) => joined.extend(before.into_iter().chain([step])),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::super::step::{NOWHERE, RailOp};
    use super::*;

    /// A copy that represents stage `stage` of chunk `chunk`.
    fn work(chunk: usize, stage: usize) -> Step {
        Step::Copy { from: NOWHERE.sized(chunk), to: NOWHERE.sized(stage) }
    }

    fn start(root: usize) -> Step {
        Step::Start(RailOp::Broadcast { root, at: NOWHERE })
    }

    #[test]
    fn newer_chunks_come_first_and_transfers_end_in_their_order() {
        let chunk = |c: usize| {
            vec![
                vec![work(c, 0), start(c)],
                vec![Step::Wait, work(c, 1), start(10 + c)],
                vec![Step::Wait, work(c, 2)],
            ]
        };
        let steps = pipeline((0..4).map(chunk).collect());
        let order: Vec<(usize, usize)> = steps
            .iter()
            .filter_map(|step| {
                if let Step::Copy { from, to } = step {
                    Some((from.bytes(), to.bytes()))
                } else {
                    None
                }
            })
            .collect();
        let wanted = [
            (0, 0),
            (1, 0),
            (0, 1),
            (2, 0),
            (1, 1),
            (0, 2),
            (3, 0),
            (2, 1),
            (1, 2),
            (3, 1),
            (2, 2),
            (3, 2),
        ];
        assert_eq!(order, wanted);
        // Each wait is for the transfer that its chunk started in the previous stage.
        let mut open = std::collections::VecDeque::new();
        let mut ended = Vec::new();
        for step in &steps {
            if let Step::Start(RailOp::Broadcast { root, .. }) = step {
                open.push_back(*root);
            }
            if *step == Step::Wait {
                ended.push(open.pop_front().expect("started"));
            }
        }
        assert_eq!((ended, open.len()), (vec![0, 1, 10, 2, 11, 3, 12, 13], 0));
    }

    #[test]
    fn a_lone_chunk_waits_at_once_unless_it_has_something_to_do() {
        let lone = |between: Vec<Step>| {
            pipeline(vec![vec![[vec![start(1)], between].concat(), vec![Step::Wait, work(0, 1)]]])
        };
        assert_eq!(
            lone(vec![]),
            [Step::Run(RailOp::Broadcast { root: 1, at: NOWHERE }), work(0, 1)]
        );
        assert_eq!(lone(vec![work(0, 0)]), [start(1), work(0, 0), Step::Wait, work(0, 1)]);
    }
}
