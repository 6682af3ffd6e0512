//! Every collective × dtype × reduce op × odd sizes × 1 to 8 ranks × algorithm, compared with the
//! definition: on private memory, and on symmetric memory of some ranks or of all. Ranks as
//! processes: `tests/python/test_symm_mem_zero_copy.py`.
//!
//! Reductions are compared bit by bit with one call of the kernel over all ranks' inputs, which
//! `kernels::cpu` checks against an f64 reference. So every algorithm, size and location of tensors
//! gives the same bits on every rank.

use crate::threads::{call, input, reduced, run, span, with_ranks};
use symm::coll::call::{CallSpec, Collective, Span};
use symm::dtype::{DType, ReduceOp};
use symm::group::Group;
use symm::kernels::cpu;
use symm::rank::Rank;
use symm::symm_mem::HOST;
use symm::window::allocations;

const PAD: usize = 9216;

/// Memory of a rank whose tensors follow each other: aligned, or at odd distances.
struct Arena {
    address: usize,
    used: usize,
    bytes: usize,
    aligned: bool,
    /// The memory, unless it is symmetric.
    private: Option<Vec<u8>>,
}

impl Arena {
    fn new(symmetric: bool, aligned: bool) -> Self {
        let bytes = if aligned { 13 << 20 } else { 6 << 20 };
        let mut private = (!symmetric).then(|| vec![0; bytes]);
        let address = match &mut private {
            Some(memory) => memory.as_mut_ptr() as usize,
            None => allocations::allocate(HOST, bytes).unwrap() as usize,
        };
        Self { address, used: 0, bytes, aligned, private }
    }

    /// Allocates consecutive tensors of these lengths, `before` bytes after the last one.
    fn take(&mut self, before: usize, lengths: &[usize]) -> Vec<Span> {
        self.used += before;
        let place = |&bytes: &usize| {
            self.used = if self.aligned { self.used.next_multiple_of(16) } else { self.used };
            let span = Span { addr: self.address + self.used, bytes };
            self.used += bytes;
            span
        };
        let spans = lengths.iter().map(place).collect();
        assert!(self.used <= self.bytes, "{} bytes", self.used);
        spans
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.private.is_none() {
            allocations::free(self.address as u64).unwrap();
        }
    }
}

fn bytes_of(span: Span) -> &'static mut [u8] {
    unsafe { std::slice::from_raw_parts_mut(span.ptr(), span.bytes) }
}

/// One rank of a test, with its own kind of memory and its own offsets of inputs and outputs.
struct Member<'a> {
    group: &'a Group,
    rank: u32,
    n: u32,
    given: Arena,
    taken: Arena,
}

impl Member<'_> {
    /// Runs a call on the tensors allocated last; later allocations reuse their memory.
    fn run(
        &mut self,
        op: Collective,
        dtype: DType,
        reduce_op: ReduceOp,
        root: u32,
        inputs: Vec<Span>,
        outputs: Vec<Span>,
    ) {
        let factor = f64::from(self.rank) + 0.5;
        let (inputs, outputs) = (inputs.into(), outputs.into());
        let spec = CallSpec {
            op,
            dtype,
            reduce_op,
            root: Rank(root),
            factor,
            inputs,
            outputs,
            call_site: None,
            compares: None,
        };
        run(self.group, spec, None).unwrap();
        (self.given.used, self.taken.used) = (0, 0);
    }

    /// [`Member::run`] of a collective that moves bytes.
    fn transfer(&mut self, op: Collective, root: u32, inputs: Vec<Span>, outputs: Vec<Span>) {
        self.run(op, DType::U8, ReduceOp::Sum, root, inputs, outputs);
    }

    /// The inputs of rank `from`, consecutive, at an offset that differs by rank.
    fn give(&mut self, dtype: DType, from: u32, lengths: &[usize]) -> Vec<Span> {
        let spans = self.given.take(7 + 5 * self.rank as usize, lengths);
        for (to, span) in (0..).zip(&spans) {
            bytes_of(*span).copy_from_slice(&input(dtype, from, to, span.bytes));
        }
        spans
    }

    /// Allocates the outputs of this rank.
    fn blank(&mut self, lengths: &[usize]) -> Vec<Span> {
        let spans = self.taken.take(3 + self.rank as usize, lengths);
        spans.iter().for_each(|span| bytes_of(*span).fill(0xee));
        spans
    }

    fn all_reduce(&mut self, dtype: DType, op: ReduceOp, bytes: usize) {
        let what =
            format!("{} ranks, {dtype:?}, {op:?}, {bytes} bytes, rank {}", self.n, self.rank);
        let all = (0..self.n).map(|from| input(dtype, from, 0, bytes)).collect::<Vec<_>>();
        let expected = reduced(dtype, op, &all);
        let spans = self.give(dtype, self.rank, &[bytes]);
        self.run(Collective::AllReduce, dtype, op, 0, spans.clone(), spans.clone());
        assert!(*bytes_of(spans[0]) == expected, "all_reduce in place, {what}");
        // Not in place, so no rank's input changes.
        let (spans, outputs) = (self.give(dtype, self.rank, &[bytes]), self.blank(&[bytes]));
        self.run(Collective::AllReduce, dtype, op, 0, spans.clone(), outputs.clone());
        assert!(
            *bytes_of(outputs[0]) == expected && *bytes_of(spans[0]) == all[self.rank as usize],
            "all_reduce, {what}"
        );
        let (root, spans) = (self.n - 1, self.give(dtype, self.rank, &[bytes]));
        let outputs = if self.rank == root { self.blank(&[bytes]) } else { vec![] };
        self.run(Collective::Reduce, dtype, op, root, spans, outputs.clone());
        assert!(outputs.iter().all(|output| *bytes_of(*output) == expected), "reduce, {what}");
    }

    /// Rank r gets `longer` times r more elements.
    fn reduce_scatter(&mut self, dtype: DType, op: ReduceOp, bytes: usize, longer: usize) {
        let lengths: Vec<usize> = (0..self.n as usize)
            .map(|r| if bytes == 0 { 0 } else { bytes + longer * r * dtype.size() })
            .collect();
        let own = self.rank as usize;
        let given = (0..self.n).map(|from| input(dtype, from, self.rank, lengths[own]));
        let expected = reduced(dtype, op, &given.collect::<Vec<_>>());
        for in_place in [false, true] {
            let inputs = self.give(dtype, self.rank, &lengths);
            let output = if in_place { inputs[own] } else { self.blank(&lengths[own..=own])[0] };
            self.run(Collective::ReduceScatter, dtype, op, 0, inputs.clone(), vec![output]);
            assert!(
                *bytes_of(output) == expected,
                "reduce_scatter of {} ranks, {dtype:?}, {op:?}, {bytes} bytes, rank {own}",
                self.n
            );
            for (to, span) in (0..).zip(inputs).filter(|(to, _)| *to != self.rank) {
                let given = input(dtype, self.rank, to, span.bytes);
                assert!(*bytes_of(span) == given, "an input has changed");
            }
        }
    }

    fn movements(&mut self, bytes: usize) {
        let (dtype, n, rank) = (DType::U8, self.n, self.rank);
        let (own, root, others) = (rank as usize, n / 2, 0..n);
        let what = |op| format!("{op} of {bytes} bytes to rank {rank} of {n}");
        let uneven = |from: u32| if bytes == 0 { 0 } else { bytes + from as usize };

        let inputs = if rank == root { self.give(dtype, rank, &[bytes]) } else { vec![] };
        let outputs = if rank == root { vec![] } else { self.blank(&[bytes]) };
        self.transfer(Collective::Broadcast, root, inputs, outputs.clone());
        let sent = input(dtype, root, 0, bytes);
        assert!(outputs.iter().all(|span| *bytes_of(*span) == sent), "{}", what("broadcast"));

        let lengths: Vec<usize> = others.clone().map(uneven).collect();
        let gathered = |outputs: &[Span]| {
            (0..).zip(outputs).all(|(r, span)| *bytes_of(*span) == input(dtype, r, 0, span.bytes))
        };
        let (inputs, outputs) = (self.give(dtype, rank, &lengths[own..=own]), self.blank(&lengths));
        self.transfer(Collective::AllGather, 0, inputs, outputs.clone());
        assert!(gathered(&outputs), "{}", what("all_gather"));
        // In place: the input is a part of the output, at the place of this rank.
        let outputs = self.given.take(own, &lengths);
        outputs.iter().for_each(|span| bytes_of(*span).fill(0xee));
        bytes_of(outputs[own]).copy_from_slice(&input(dtype, rank, 0, lengths[own]));
        self.transfer(Collective::AllGather, 0, vec![outputs[own]], outputs.clone());
        assert!(gathered(&outputs), "{}", what("all_gather in place"));

        let outputs = if rank == root { self.blank(&vec![bytes; n as usize]) } else { vec![] };
        let inputs = self.give(dtype, rank, &[bytes]);
        self.transfer(Collective::Gather, root, inputs, outputs.clone());
        assert!(gathered(&outputs), "{}", what("gather"));

        let inputs =
            if rank == root { self.give(dtype, rank, &vec![bytes; n as usize]) } else { vec![] };
        let outputs = self.blank(&[bytes]);
        self.transfer(Collective::Scatter, root, inputs, outputs.clone());
        assert!(*bytes_of(outputs[0]) == input(dtype, root, rank, bytes), "{}", what("scatter"));

        // Every pair has a different length; one is zero.
        let pair =
            |from: u32, to: u32| if (from, to) == (0, n - 1) { 0 } else { uneven(2 * from + to) };
        let sent: Vec<usize> = others.clone().map(|to| pair(rank, to)).collect();
        let got: Vec<usize> = others.map(|from| pair(from, rank)).collect();
        let (inputs, outputs) = (self.give(dtype, rank, &sent), self.blank(&got));
        self.transfer(Collective::AllToAll, 0, inputs, outputs.clone());
        let exchanged = |outputs: &[Span]| {
            (0..)
                .zip(outputs)
                .all(|(r, span)| *bytes_of(*span) == input(dtype, r, rank, span.bytes))
        };
        assert!(exchanged(&outputs), "{}", what("all_to_all"));
        // In place, so peers must not read memory that this rank overwrites.
        let spans = self.give(dtype, rank, &vec![bytes; n as usize]);
        self.transfer(Collective::AllToAll, 0, spans.clone(), spans.clone());
        assert!(exchanged(&spans), "{}", what("all_to_all in place"));
    }
}

/// The ranks whose memory is symmetric.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Symmetric {
    /// No rank: tensors are in aligned private memory.
    None,
    All,
    /// All ranks but the last one.
    Most,
    /// All ranks, but only for inputs.
    Given,
}

fn with_members(n: u32, symmetric: Symmetric, body: impl Fn(&mut Member<'_>) + Sync) {
    with_ranks(n, |group, rank| {
        let (given, taken) = match symmetric {
            Symmetric::None => (false, false),
            Symmetric::All => (true, true),
            Symmetric::Most => (rank + 1 < n, rank + 1 < n),
            Symmetric::Given => (true, false),
        };
        let aligned = symmetric == Symmetric::None;
        // Any rendezvous links the ranks; the content of its window does not matter.
        let window = (!aligned).then(|| {
            let address = allocations::allocate(HOST, 64).unwrap();
            (group.rendezvous(HOST, address, PAD, None).unwrap(), address)
        });
        body(&mut Member {
            group,
            rank,
            n,
            given: Arena::new(given, aligned),
            taken: Arena::new(taken, aligned),
        });
        if let Some((window, address)) = window {
            drop(window);
            allocations::free(address).unwrap();
        }
    });
}

/// Numbers of elements: none, odd counts that fit next to a flag, one staged chunk, and many
/// chunks.
const COUNTS: [usize; 6] = [0, 1, 17, 1001, 9_999, 150_001];

#[test]
fn movements_of_every_size_and_algorithm() {
    for n in 1..=8 {
        with_members(n, Symmetric::None, |member| {
            COUNTS.into_iter().chain([600_001, 1_500_000]).for_each(|bytes| member.movements(bytes))
        });
    }
}

#[test]
fn reductions_of_every_dtype_and_op() {
    let private = (1..=8).map(|n| (n, Symmetric::None, &[0, 1, 17, 1001][..]));
    let symmetric = [1, 2, 3, 5].map(|n| (n, Symmetric::All, &[9001][..]));
    for (n, symmetric, counts) in private.chain(symmetric) {
        with_members(n, symmetric, |member| {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL.iter().filter(|op| cpu::supports(**op, dtype).is_ok()) {
                    let longer = usize::from(symmetric == Symmetric::All);
                    for bytes in counts.iter().map(|count| count * dtype.size()) {
                        member.all_reduce(dtype, op, bytes);
                        member.reduce_scatter(dtype, op, bytes, longer);
                    }
                }
            }
        });
    }
}

#[test]
fn reductions_of_every_size() {
    for n in [2, 3, 4, 7] {
        with_members(n, Symmetric::None, |member| {
            for dtype in [DType::F32, DType::BF16, DType::F8E4M3FN, DType::I64] {
                for count in COUNTS {
                    member.all_reduce(dtype, ReduceOp::Sum, count * dtype.size());
                    for longer in [0, 1] {
                        member.reduce_scatter(dtype, ReduceOp::Sum, count * dtype.size(), longer);
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
                    member.reduce_scatter(DType::BF16, ReduceOp::Sum, count * 2, 1);
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
                member.transfer(Collective::AllReduce, 0, spans.clone(), spans.clone());
                let sum = (0..n).fold(0u8, |sum, rank| sum.wrapping_add((turn + rank) as u8));
                assert!(bytes_of(spans[0]).iter().all(|&byte| byte == sum), "turn {turn}");
            } else {
                let outputs = member.taken.take(0, &vec![40_000; n as usize]);
                member.transfer(Collective::AllGather, 0, spans.clone(), outputs.clone());
                bytes_of(spans[0]).fill(0xaa);
                for (value, span) in (turn..).zip(&outputs) {
                    assert!(bytes_of(*span).iter().all(|&byte| byte == value as u8), "turn {turn}");
                }
            }
        }
    });
}

/// Sums `data` of all ranks in place.
fn all_reduce(group: &Group, data: &mut [i32]) {
    let span = vec![span(data)];
    let spec = call(Collective::AllReduce, DType::I32, span.clone(), span);
    run(group, spec, None).expect("all_reduce");
}

#[test]
fn many_small_calls_of_mixed_kinds_keep_their_order() {
    with_ranks(4, |group, rank| {
        for i in 0..2000 {
            let mut data = vec![i * (rank as i32 + 1); [1, 16, 3000, 25][i as usize % 4]];
            all_reduce(group, &mut data);
            assert!(data.iter().all(|&value| value == 10 * i), "call {i}");
        }
    });
}
