//! Collectives on symmetric memory of the host, with ranks as threads: the results of those on other memory, bit by bit, wherever tensors
//! lie and whoever has symmetric ones. Ranks as processes: `tests/python/test_symm_mem_direct.py`.
#![allow(missing_docs, clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

mod ranks;

use ranks::{input, reduced, with_ranks};
use symm::coll::call::{Call, Op, Span};
use symm::dtype::{DType, ReduceOp};
use symm::group::{Group, Tuning};
use symm::kernels::cpu;
use symm::rank::Rank;
use symm::symm_mem::HOST;
use symm::window::allocations;

const ROOM: usize = 6 << 20;
const PAD: usize = 9216;

/// Memory of a rank, in which tensors follow each other at odd distances.
struct Arena {
    address: usize,
    used: usize,
    /// Whether it is symmetric: else `kept` has it.
    symmetric: bool,
    kept: Vec<u8>,
}

impl Arena {
    fn new(symmetric: bool) -> Self {
        if symmetric {
            return Self { address: allocations::allocate(HOST, ROOM).unwrap() as usize, used: 0, symmetric, kept: Vec::new() };
        }
        let mut kept = vec![0; ROOM];
        Self { address: kept.as_mut_ptr() as usize, used: 0, symmetric, kept }
    }

    /// New tensors of these lengths, one behind the other, `before` bytes behind the last one.
    fn take(&mut self, before: usize, lengths: &[usize]) -> Vec<Span> {
        self.used += before;
        let spans = lengths.iter().map(|&bytes| {
            let span = Span { addr: self.address + self.used, bytes };
            self.used += bytes;
            span
        });
        let spans = spans.collect();
        assert!(self.used <= ROOM, "{} bytes", self.used);
        spans
    }

    fn clear(&mut self) {
        self.used = 0;
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.symmetric {
            allocations::free(self.address as u64).unwrap();
        }
        self.kept.clear();
    }
}

fn bytes_of(span: Span) -> &'static mut [u8] {
    unsafe { std::slice::from_raw_parts_mut(span.ptr(), span.bytes) }
}

/// One rank of a test: its inputs and outputs lie in memory of its own kind, at places of its own.
struct Member<'a> {
    group: &'a Group,
    rank: u32,
    n: u32,
    given: Arena,
    taken: Arena,
}

impl Member<'_> {
    fn run(&self, op: Op, dtype: DType, reduce_op: ReduceOp, root: u32, inputs: Vec<Span>, outputs: Vec<Span>) {
        let factor = f64::from(self.rank) + 0.5;
        let call = Call { op, dtype, reduce_op, root: Rank(root), factor, inputs, outputs, call_site: None };
        self.group.run(vec![call], None).unwrap();
    }

    /// What rank `from` gives to others, one behind the other, at a place that differs by rank.
    fn give(&mut self, dtype: DType, from: u32, lengths: &[usize]) -> Vec<Span> {
        let spans = self.given.take(7 + 5 * self.rank as usize, lengths);
        for (to, span) in (0..).zip(&spans) {
            bytes_of(*span).copy_from_slice(&input(dtype, from, to, span.bytes));
        }
        spans
    }

    /// Room for what this rank gets.
    fn blank(&mut self, lengths: &[usize]) -> Vec<Span> {
        let spans = self.taken.take(3 + self.rank as usize, lengths);
        spans.iter().for_each(|span| bytes_of(*span).fill(0xee));
        spans
    }

    fn all_reduce(&mut self, dtype: DType, op: ReduceOp, bytes: usize) {
        let what = format!("{} ranks, {dtype:?}, {op:?}, {bytes} bytes, rank {}", self.n, self.rank);
        let all = (0..self.n).map(|from| input(dtype, from, 0, bytes)).collect::<Vec<_>>();
        let spans = self.give(dtype, self.rank, &[bytes]);
        self.run(Op::AllReduce, dtype, op, 0, spans.clone(), spans.clone());
        assert!(*bytes_of(spans[0]) == reduced(dtype, op, &all), "all_reduce in place, {what}");
        // Not in place: nobody's input changes.
        let (spans, outputs) = (self.give(dtype, self.rank, &[bytes]), self.blank(&[bytes]));
        self.run(Op::AllReduce, dtype, op, 0, spans.clone(), outputs.clone());
        assert!(*bytes_of(outputs[0]) == reduced(dtype, op, &all) && *bytes_of(spans[0]) == all[self.rank as usize], "all_reduce, {what}");
        self.given.clear();
        self.taken.clear();
    }

    fn reduce_scatter(&mut self, dtype: DType, op: ReduceOp, bytes: usize) {
        // Rank r gets r elements more.
        let lengths: Vec<usize> = (0..self.n as usize).map(|r| if bytes == 0 { 0 } else { bytes + r * dtype.size() }).collect();
        let own = self.rank as usize;
        let expected = reduced(dtype, op, &(0..self.n).map(|from| input(dtype, from, self.rank, lengths[own])).collect::<Vec<_>>());
        for in_place in [false, true] {
            let inputs = self.give(dtype, self.rank, &lengths);
            let output = if in_place { inputs[own] } else { self.blank(&lengths[own..=own])[0] };
            self.run(Op::ReduceScatter, dtype, op, 0, inputs.clone(), vec![output]);
            assert!(*bytes_of(output) == expected, "reduce_scatter of {} ranks, {dtype:?}, {op:?}, {bytes} bytes, rank {own}", self.n);
            for (to, span) in (0..).zip(inputs).filter(|(to, _)| *to != self.rank) {
                assert!(*bytes_of(span) == input(dtype, self.rank, to, span.bytes), "an input has changed");
            }
        }
        self.given.clear();
        self.taken.clear();
    }

    fn movements(&mut self, bytes: usize) {
        let (dtype, sum, n, rank) = (DType::U8, ReduceOp::Sum, self.n, self.rank);
        let (own, root, others) = (rank as usize, n / 2, 0..n);
        let what = |op| format!("{op} of {bytes} bytes to rank {rank} of {n}");
        let uneven = |from: u32| if bytes == 0 { 0 } else { bytes + from as usize };

        let inputs = if rank == root { self.give(dtype, rank, &[bytes]) } else { vec![] };
        let outputs = if rank == root { vec![] } else { self.blank(&[bytes]) };
        self.run(Op::Broadcast, dtype, sum, root, inputs, outputs.clone());
        assert!(outputs.iter().all(|span| *bytes_of(*span) == input(dtype, root, 0, bytes)), "{}", what("broadcast"));

        let lengths: Vec<usize> = others.clone().map(uneven).collect();
        let gathered = |outputs: &[Span]| (0..).zip(outputs).all(|(r, span)| *bytes_of(*span) == input(dtype, r, 0, span.bytes));
        let (inputs, outputs) = (self.give(dtype, rank, &lengths[own..=own]), self.blank(&lengths));
        self.run(Op::AllGather, dtype, sum, 0, inputs, outputs.clone());
        assert!(gathered(&outputs), "{}", what("all_gather"));
        // In place: what this rank gives lies where it would receive it.
        let outputs = self.given.take(own, &lengths);
        outputs.iter().for_each(|span| bytes_of(*span).fill(0xee));
        bytes_of(outputs[own]).copy_from_slice(&input(dtype, rank, 0, lengths[own]));
        self.run(Op::AllGather, dtype, sum, 0, vec![outputs[own]], outputs.clone());
        assert!(gathered(&outputs), "{}", what("all_gather in place"));

        let outputs = if rank == root { self.blank(&vec![bytes; n as usize]) } else { vec![] };
        let inputs = self.give(dtype, rank, &[bytes]);
        self.run(Op::Gather, dtype, sum, root, inputs, outputs.clone());
        assert!(gathered(&outputs), "{}", what("gather"));

        let inputs = if rank == root { self.give(dtype, rank, &vec![bytes; n as usize]) } else { vec![] };
        let outputs = self.blank(&[bytes]);
        self.run(Op::Scatter, dtype, sum, root, inputs, outputs.clone());
        assert!(*bytes_of(outputs[0]) == input(dtype, root, rank, bytes), "{}", what("scatter"));

        // Every pair has a length of its own; one is zero.
        let pair = |from: u32, to: u32| if (from, to) == (0, n - 1) { 0 } else { uneven(2 * from + to) };
        let sent: Vec<usize> = others.clone().map(|to| pair(rank, to)).collect();
        let got: Vec<usize> = others.map(|from| pair(from, rank)).collect();
        let (inputs, outputs) = (self.give(dtype, rank, &sent), self.blank(&got));
        self.run(Op::AllToAll, dtype, sum, 0, inputs, outputs.clone());
        let exchanged = |outputs: &[Span]| (0..).zip(outputs).all(|(r, span)| *bytes_of(*span) == input(dtype, r, rank, span.bytes));
        assert!(exchanged(&outputs), "{}", what("all_to_all"));
        // In place: peers would read what this rank overwrites, so they must not.
        let spans = self.give(dtype, rank, &vec![bytes; n as usize]);
        self.run(Op::AllToAll, dtype, sum, 0, spans.clone(), spans.clone());
        assert!(exchanged(&spans), "{}", what("all_to_all in place"));
        self.given.clear();
        self.taken.clear();
    }
}

/// Ranks whose memory is symmetric.
#[derive(Clone, Copy, Debug)]
enum Symmetric {
    All,
    /// All but the last one.
    Most,
    /// All of what they give, nothing of what they take.
    Given,
}

fn with_members(n: u32, symmetric: Symmetric, body: impl Fn(&mut Member<'_>) + Sync) {
    with_ranks(n, Tuning::default(), |group, rank| {
        let kinds = match symmetric {
            Symmetric::All => (true, true),
            Symmetric::Most => (rank + 1 < n, rank + 1 < n),
            Symmetric::Given => (true, false),
        };
        // Any rendezvous links the ranks; what lies in its window matters to nobody.
        let address = allocations::allocate(HOST, 64).unwrap();
        let window = group.rendezvous(HOST, address, PAD, None).unwrap();
        body(&mut Member { group, rank, n, given: Arena::new(kinds.0), taken: Arena::new(kinds.1) });
        drop(window);
        allocations::free(address).unwrap();
    });
}

#[test]
fn reductions_of_every_dtype_and_op() {
    for n in [1, 2, 3, 5] {
        with_members(n, Symmetric::All, |member| {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL {
                    if cpu::supports(op, dtype).is_ok() {
                        member.all_reduce(dtype, op, 9001 * dtype.size());
                        member.reduce_scatter(dtype, op, 4099 * dtype.size());
                    }
                }
            }
        });
    }
}

#[test]
fn every_size_whoever_has_symmetric_memory() {
    for symmetric in [Symmetric::All, Symmetric::Most, Symmetric::Given] {
        for n in [2, 4, 7] {
            with_members(n, symmetric, |member| {
                for count in [0, 1, 1001, 2040, 2041, 9_999, 100_003] {
                    member.all_reduce(DType::F32, ReduceOp::Sum, count * 4);
                    member.reduce_scatter(DType::BF16, ReduceOp::Sum, count * 2);
                    member.movements(count);
                }
            });
        }
    }
}

#[test]
fn no_rank_returns_while_another_reads_its_tensor() {
    with_members(4, Symmetric::All, |member| {
        let n = member.n;
        for turn in 0..200u32 {
            let spans = member.given.take(0, &[40_000]);
            bytes_of(spans[0]).fill((turn + member.rank) as u8);
            if turn % 2 == 0 {
                member.run(Op::AllReduce, DType::U8, ReduceOp::Sum, 0, spans.clone(), spans.clone());
                let sum = (0..n).fold(0u8, |sum, rank| sum.wrapping_add((turn + rank) as u8));
                assert!(bytes_of(spans[0]).iter().all(|&byte| byte == sum), "turn {turn}");
            } else {
                let outputs = member.taken.take(0, &vec![40_000; n as usize]);
                member.run(Op::AllGather, DType::U8, ReduceOp::Sum, 0, spans.clone(), outputs.clone());
                bytes_of(spans[0]).fill(0xaa);
                for (rank, span) in (0..).zip(&outputs) {
                    assert!(bytes_of(*span).iter().all(|&byte| byte == (turn + rank) as u8), "turn {turn}");
                }
                member.taken.clear();
            }
            member.given.clear();
        }
    });
}
