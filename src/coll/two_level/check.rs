//! The rules that every program obeys, and on which executors rely when they access memory.

use super::step::{Place, Program, ProgramMemory, RailOp, Step};
use crate::coll::call::CallSpec;
use std::collections::VecDeque;

/// The places that a step reads and the places that it writes.
#[derive(Default)]
struct Touched {
    reads: Vec<Place>,
    writes: Vec<Place>,
}

/// Checks the program of a rank of node `node` for `call`:
///
/// - Every place is in the program's memory or in a tensor, and no step writes an input.
/// - No step writes bytes that it reads, except in place.
/// - No step reads bytes that an unfinished transfer writes, and no step writes bytes that an
///   unfinished transfer uses.
/// - Each started transfer has one wait.
///
/// # Errors
/// The first step that breaks a rule, and the rule.
pub fn check(program: &Program, call: &CallSpec, node: usize) -> Result<(), String> {
    let mut open: VecDeque<Touched> = VecDeque::new();
    for step in &program.steps {
        let refused = |rule: &str| Err(format!("{rule}: {step:?}"));
        if *step == Step::Wait {
            if open.pop_front().is_none() {
                return refused("no transfer was started");
            }
            continue;
        }
        for touched in touched(step, node) {
            let written = touched.writes.iter().map(|place| (place, true));
            if !touched
                .reads
                .iter()
                .map(|place| (place, false))
                .chain(written)
                .all(|(place, writes)| lies(place, writes, program, call))
            {
                return refused("outside of its memory");
            }
            let clash = |reads: &[Place], writes: &[Place]| {
                reads.iter().any(|read| writes.iter().any(|write| overlap(read, write)))
            };
            let aliased = |write: &Place| {
                touched
                    .reads
                    .iter()
                    .any(|read| overlap(read, write) && !in_place(step, read, write))
            };
            if touched.writes.iter().any(aliased) {
                return refused("writes what it reads");
            }
            for other in &open {
                if clash(&touched.reads, &other.writes)
                    || clash(&other.reads, &touched.writes)
                    || clash(&other.writes, &touched.writes)
                {
                    return refused("uses what a transfer does");
                }
            }
            if matches!(step, Step::Start(_)) {
                open.push_back(touched);
            }
        }
    }
    if open.is_empty() { Ok(()) } else { Err(format!("{} transfers have no wait", open.len())) }
}

/// Returns the memory that `step` accesses, call by call.
fn touched(step: &Step, node: usize) -> Vec<Touched> {
    let one = |reads: &[Place], writes: &[Place]| {
        vec![Touched { reads: reads.to_vec(), writes: writes.to_vec() }]
    };
    match step {
        Step::Local(calls) => {
            calls.iter().flat_map(|call| one(&call.inputs, &call.outputs)).collect()
        }
        Step::Agree | Step::Wait => vec![],
        Step::Start(transfer) | Step::Run(transfer) => match transfer {
            RailOp::AllGather { from, to } | RailOp::AllToAll { from, to, .. } => {
                one(&[*from], &[*to])
            }
            RailOp::Broadcast { root, at } if *root == node => one(&[*at], &[]),
            RailOp::Broadcast { at, .. } => one(&[], &[*at]),
        },
        Step::Exchange { give, take } => one(give, take),
        Step::Combine { from, to } => one(from, &[*to]),
        Step::Cast { from, to, .. } | Step::Copy { from, to } => one(&[*from], &[*to]),
    }
}

/// Returns true if `place` is within its memory. If the step `writes` a place that is in a tensor,
/// the tensor must be an output.
fn lies(place: &Place, writes: bool, program: &Program, call: &CallSpec) -> bool {
    let (start, end) = (place.span.addr, place.span.addr + place.bytes());
    match place.memory {
        _ if place.bytes() == 0 => true,
        ProgramMemory::Temp => end <= program.temp,
        ProgramMemory::Aside => end <= program.aside,
        ProgramMemory::Given => {
            let inputs = call.inputs.iter().filter(|_| !writes);
            let spans: Vec<_> =
                inputs.chain(&*call.outputs).filter(|span| span.bytes > 0).collect();
            // Contiguous tensors count as one.
            let mut at = start;
            while let Some(span) =
                spans.iter().find(|span| (span.addr..span.addr + span.bytes).contains(&at))
            {
                at = span.addr + span.bytes;
            }
            at >= end
        }
    }
}

fn overlap(a: &Place, b: &Place) -> bool {
    let (start, end) =
        (a.span.addr.max(b.span.addr), (a.span.addr + a.bytes()).min(b.span.addr + b.bytes()));
    a.memory == b.memory && start < end
}

/// Returns true if `step` may read `read` and write `write`, which overlap.
fn in_place(step: &Step, read: &Place, write: &Place) -> bool {
    match step {
        Step::Local(_) => read == write,
        Step::Start(RailOp::AllGather { from, to }) | Step::Run(RailOp::AllGather { from, to }) => {
            (from.span.addr - to.span.addr).is_multiple_of(from.bytes())
        }
        Step::Start(_) | Step::Run(_) | Step::Agree | Step::Wait => false,
        Step::Exchange { .. } | Step::Combine { .. } | Step::Cast { .. } | Step::Copy { .. } => {
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::{Collective, Span};
    use crate::dtype::DType;

    #[test]
    fn programs_that_break_a_rule_are_refused() {
        let (input, output) = (Span { addr: 1000, bytes: 64 }, Span { addr: 2000, bytes: 64 });
        let call = CallSpec {
            op: Collective::AllReduce,
            inputs: vec![input].into(),
            outputs: vec![output].into(),
            ..CallSpec::barrier(None)
        };
        let given = |addr| Place { memory: ProgramMemory::Given, span: Span { addr, bytes: 64 } };
        let temp = |addr| Place { memory: ProgramMemory::Temp, span: Span { addr, bytes: 64 } };
        let copy = |from, to| Step::Copy { from, to };
        let gather = |from, to: Place| RailOp::AllGather { from, to: to.sized(128) };
        let refused = |steps: Vec<Step>| {
            let program = Program { steps, temp: 256, aside: 0, rails: 1, partial: DType::U8 };
            check(&program, &call, 0)
                .err()
                .map(|text| text.split(':').next().unwrap_or_default().to_owned())
        };
        let start = Step::Start(gather(temp(0), temp(64)));
        assert_eq!(
            refused(vec![
                copy(given(1000), temp(0)),
                start.clone(),
                Step::Wait,
                copy(temp(128), given(2000))
            ]),
            None
        );
        assert_eq!(refused(vec![Step::Run(gather(temp(0), temp(0)))]), None);
        let says = |steps, rule: &str| assert_eq!(refused(steps).as_deref(), Some(rule));
        says(vec![copy(temp(0), temp(193))], "outside of its memory");
        says(vec![copy(given(1001), temp(0))], "outside of its memory");
        says(vec![copy(temp(0), given(1000))], "outside of its memory");
        says(vec![copy(temp(0), temp(63))], "writes what it reads");
        says(vec![Step::Run(gather(temp(100), temp(64)))], "writes what it reads");
        says(vec![start.clone(), copy(temp(64), given(2000))], "uses what a transfer does");
        says(vec![start.clone(), copy(given(1000), temp(0))], "uses what a transfer does");
        says(vec![Step::Wait], "no transfer was started");
        says(vec![start], "1 transfers have no wait");
    }
}
