//! Finds the inputs of a list of calls that an output of one of these calls overwrites before they
//! are read.

use super::call::CallSpec;
use crate::mem::span::Span;
use crate::op::Collective;
use crate::rank::Rank;

/// An input that must be copied before the calls are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aside {
    /// Index of the call.
    pub call: usize,
    /// Index of its input.
    pub input: usize,
}

/// Returns the inputs of `calls`, which rank `me` runs in this order, that share memory with an
/// output of the same call or of an earlier one. Inputs that an output of their call replaces in
/// place are left out. Outputs must not share memory with each other.
pub fn overwritten(calls: &[CallSpec<'_>], me: Rank) -> Vec<Aside> {
    let all = || calls.iter().flat_map(|call| &*call.outputs).filter(|span| span.bytes > 0);
    let Some(start) = all().map(|span| span.addr).min() else { return Vec::new() };
    let end = all().map(|span| end(*span)).max().unwrap_or(start);
    let suspects = || {
        let inputs = (0..).zip(calls).flat_map(|(at, call)| {
            (0..).zip(&*call.inputs).map(move |(input, span)| (at, call, input, *span))
        });
        inputs.filter(move |(_, call, input, span)| {
            span.bytes > 0
                && span.addr < end
                && start < self::end(*span)
                && replaced(call, *input, me) != Some(*span)
        })
    };
    if suspects().next().is_none() {
        return Vec::new();
    }
    let numbered =
        (0..).zip(calls).flat_map(|(at, call)| call.outputs.iter().map(move |span| (*span, at)));
    let mut outputs: Vec<(Span, usize)> = numbered.filter(|(span, _)| span.bytes > 0).collect();
    outputs.sort_unstable_by_key(|(span, _)| span.addr);
    let meets = |at: usize, input: Span| {
        let first = outputs.partition_point(|(span, _)| self::end(*span) <= input.addr);
        outputs[first..]
            .iter()
            .take_while(|(span, _)| span.addr < self::end(input))
            .any(|&(_, by)| by <= at)
    };
    let met = suspects().filter(|&(at, _, _, span)| meets(at, span));
    met.map(|(call, _, input, _)| Aside { call, input }).collect()
}

fn end(span: Span) -> usize {
    span.addr + span.bytes
}

/// Returns the output of `call` that may be exactly the memory of its input `input`.
fn replaced(call: &CallSpec<'_>, input: usize, me: Rank) -> Option<Span> {
    let (from, to) = match call.op {
        Collective::AllReduce | Collective::Reduce => (0, 0),
        Collective::AllReduceAddRmsNorm => (input.min(1), input),
        Collective::AllGather | Collective::Gather => (0, me.index()),
        Collective::Scatter | Collective::ReduceScatter => (me.index(), 0),
        Collective::Barrier | Collective::Broadcast | Collective::AllToAll => return None,
    };
    if input == from { call.outputs.get(to).copied() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::call::CallSpec;

    /// Makes a call of `op` whose spans are pairs of an address and a length.
    fn call(
        op: Collective,
        inputs: &[(usize, usize)],
        outputs: &[(usize, usize)],
    ) -> CallSpec<'static> {
        let spans = |list: &[(usize, usize)]| {
            list.iter().map(|&(addr, bytes)| Span { addr, bytes }).collect::<Vec<_>>().into()
        };
        CallSpec { op, inputs: spans(inputs), outputs: spans(outputs), ..CallSpec::barrier(None) }
    }

    fn found(calls: &[CallSpec<'_>], me: u32) -> Vec<(usize, usize)> {
        overwritten(calls, Rank(me)).iter().map(|aside| (aside.call, aside.input)).collect()
    }

    #[test]
    fn in_place_is_where_the_collective_has_it() {
        let (first, second, none) = ((64, 8), (72, 8), (64, 0));
        use Collective::{
            AllGather, AllReduce, AllReduceAddRmsNorm, AllToAll, Gather, Reduce, ReduceScatter,
            Scatter,
        };
        let third = (80, 8);
        for (op, inputs, outputs, me, copied) in [
            (AllReduce, vec![first], vec![first], 0, vec![]),
            (Reduce, vec![first], vec![first], 1, vec![]),
            (AllReduce, vec![(64, 8)], vec![(68, 8)], 0, vec![(0, 0)]),
            (AllReduce, vec![(68, 8)], vec![(64, 8)], 0, vec![(0, 0)]),
            (AllReduce, vec![(64, 4)], vec![first], 0, vec![(0, 0)]),
            (AllReduce, vec![none], vec![first], 0, vec![]),
            (AllReduce, vec![first], vec![none], 0, vec![]),
            (AllGather, vec![second], vec![first, second], 1, vec![]),
            (AllGather, vec![second], vec![first, second], 0, vec![(0, 0)]),
            (Gather, vec![first], vec![first, second], 0, vec![]),
            (Gather, vec![first], vec![], 0, vec![]),
            (Scatter, vec![first, second], vec![second], 1, vec![]),
            (Scatter, vec![first, second], vec![second], 0, vec![(0, 1)]),
            (ReduceScatter, vec![first, second], vec![first], 0, vec![]),
            (ReduceScatter, vec![first, second], vec![(64, 16)], 0, vec![(0, 0), (0, 1)]),
            (AllToAll, vec![first, second], vec![first, second], 0, vec![(0, 0), (0, 1)]),
            (AllToAll, vec![first, second], vec![third, (88, 8)], 0, vec![]),
            (AllReduceAddRmsNorm, vec![first, second, third], vec![first, second], 0, vec![]),
            (
                AllReduceAddRmsNorm,
                vec![first, second, third],
                vec![(88, 8), third],
                0,
                vec![(0, 2)],
            ),
            (
                AllReduceAddRmsNorm,
                vec![first, second],
                vec![second, first],
                0,
                vec![(0, 0), (0, 1)],
            ),
        ] {
            assert_eq!(
                found(&[call(op, &inputs, &outputs)], me),
                copied,
                "{op:?} of {inputs:?} into {outputs:?} on rank {me}"
            );
        }
    }

    #[test]
    fn memory_between_two_outputs_is_free() {
        let outputs = [(200, 8), (100, 8), (300, 8)];
        assert_eq!(found(&[call(Collective::AllGather, &[(108, 92)], &outputs)], 0), []);
        assert_eq!(found(&[call(Collective::AllGather, &[(107, 92)], &outputs)], 0), [(0, 0)]);
        assert_eq!(found(&[call(Collective::AllGather, &[(108, 93)], &outputs)], 0), [(0, 0)]);
    }

    #[test]
    fn only_calls_that_come_first_overwrite() {
        let reduce = |input, output| call(Collective::AllReduce, &[(input, 8)], &[(output, 8)]);
        // First case: the second call's input is the first call's output. Second case: the first
        // call reads its input before the second call overwrites it.
        assert_eq!(found(&[reduce(64, 80), reduce(80, 96)], 0), [(1, 0)]);
        assert_eq!(found(&[reduce(64, 80), reduce(96, 64)], 0), []);
    }
}
