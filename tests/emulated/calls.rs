//! Collectives on all ranks of a group at once: each rank's inputs and expected outputs.

use symm::coll::call::{CallSpec, Collective, Span};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cpu::{self, InputElements, WriteMode};
use symm::rank::Rank;

/// A xorshift generator.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() >> 20) as usize % end
    }

    pub(crate) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns a number of bytes, a multiple of `unit` and mostly small.
    pub(crate) fn bytes(&mut self, unit: usize) -> usize {
        let end = self.of(&[1, 40, 40, 700, 700, 6000, 20_000, 60_000]);
        self.below(end) / unit * unit
    }
}

/// The inputs and outputs of one rank in one call, at odd addresses if `shift` is odd.
pub(crate) struct Tensors {
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) outputs: Vec<Vec<u8>>,
    pub(crate) shift: usize,
    pub(crate) in_place: bool,
}

impl Tensors {
    pub(crate) fn new(inputs: &[usize], outputs: &[usize], shift: usize, seed: u64) -> Self {
        let mut random = Random(seed | 1);
        let mut fill = |bytes: usize| {
            let mut data = vec![0u8; shift + bytes];
            // Any byte: floats of either sign and of any size, and also NaN.
            data[shift..].fill_with(|| (random.next() >> 33) as u8);
            data
        };
        let inputs = inputs.iter().map(|&bytes| fill(bytes)).collect();
        let outputs = outputs.iter().map(|&bytes| vec![0xEE; shift + bytes]).collect();
        Self { inputs, outputs, shift, in_place: false }
    }

    pub(crate) fn spans(&self, data: &[Vec<u8>]) -> Vec<Span> {
        data.iter()
            .map(|d| Span { addr: d.as_ptr() as usize + self.shift, bytes: d.len() - self.shift })
            .collect()
    }

    pub(crate) fn input(&self, i: usize) -> &[u8] {
        &self.inputs[i][self.shift..]
    }

    pub(crate) fn output(&self, i: usize) -> &[u8] {
        &self.outputs[i][self.shift..]
    }
}

/// The factor of `rank` under PREMUL_SUM.
pub(crate) fn factor(rank: usize) -> f64 {
    0.5 + rank as f64 / 4.0
}

/// Returns the CPU's reduction of `pieces`, which have the same length. `factor` returns the factor
/// of the piece with the given index.
pub(crate) fn on_cpu(
    order: SumOrder,
    op: ReduceOp,
    dtype: DType,
    pieces: &[impl AsRef<[u8]>],
    factor: impl Fn(usize) -> f64,
) -> Vec<u8> {
    let mut result = vec![0u8; pieces[0].as_ref().len()];
    let source = |(rank, piece): (usize, &_)| InputElements {
        ptr: AsRef::<[u8]>::as_ref(piece).as_ptr(),
        factor: factor(rank),
    };
    let sources: Vec<InputElements> = pieces.iter().enumerate().map(source).collect();
    let (to, count) = (result.as_mut_ptr(), result.len() / dtype.size());
    // SAFETY: all pieces and the result are `count` elements long.
    unsafe { cpu::reduce_in(order, op, dtype, to, &sources, count, WriteMode::Cached) };
    result
}

/// One collective on all ranks.
pub(crate) struct Case {
    pub(crate) op: Collective,
    pub(crate) dtype: DType,
    pub(crate) reduce_op: ReduceOp,
    pub(crate) root: usize,
    /// Number of elements in the message, or in the message between each pair of ranks.
    pub(crate) count: usize,
    pub(crate) uneven: bool,
    pub(crate) shift: usize,
    pub(crate) order: SumOrder,
}

impl Case {
    pub(crate) fn bytes(&self, from: usize, to: usize) -> usize {
        let count =
            if self.uneven { self.count * ((from * 3 + to * 5) % 4) / 2 } else { self.count };
        count * self.dtype.size()
    }

    /// Lengths of the inputs and outputs of rank `me` in a group of `n` ranks.
    pub(crate) fn lengths(&self, me: usize, n: usize) -> (Vec<usize>, Vec<usize>) {
        let one = self.count * self.dtype.size();
        let root = me == self.root;
        let when = |yes: bool, list: Vec<usize>| if yes { list } else { Vec::new() };
        match self.op {
            Collective::Barrier => (vec![], vec![]),
            Collective::Broadcast => (when(root, vec![one]), when(!root, vec![one])),
            Collective::AllReduce => (vec![one], vec![one]),
            Collective::Reduce => (vec![one], when(root, vec![one])),
            Collective::AllGather => {
                (vec![self.bytes(me, 0)], (0..n).map(|r| self.bytes(r, 0)).collect())
            }
            Collective::Gather => (vec![one], when(root, vec![one; n])),
            Collective::Scatter => (when(root, vec![one; n]), vec![one]),
            Collective::ReduceScatter => {
                ((0..n).map(|r| self.bytes(0, r)).collect(), vec![self.bytes(0, me)])
            }
            Collective::AllToAll => (
                (0..n).map(|r| self.bytes(me, r)).collect(),
                (0..n).map(|r| self.bytes(r, me)).collect(),
            ),
            Collective::AllReduceAddRmsNorm => unreachable!("not of c10d"),
        }
    }

    /// The tensors of rank `me` of `n`; their content depends on `seed`.
    pub(crate) fn tensors(&self, me: usize, n: usize, seed: usize) -> Tensors {
        let (inputs, outputs) = self.lengths(me, n);
        let seed = (seed * 64 + me) as u64 * 0x9e37_79b9;
        Tensors::new(&inputs, &outputs, self.shift, seed)
    }

    /// The tensors of all of `n` ranks in each of `cases`.
    pub(crate) fn all_tensors(cases: &[Self], n: usize, seed: usize) -> Vec<Vec<Tensors>> {
        let of =
            |(i, case): (usize, &Self)| (0..n).map(|me| case.tensors(me, n, seed + i)).collect();
        cases.iter().enumerate().map(of).collect()
    }

    pub(crate) fn call(&self, tensors: &Tensors) -> CallSpec<'static> {
        let inputs = tensors.spans(&tensors.inputs);
        let outputs =
            if tensors.in_place { inputs.clone() } else { tensors.spans(&tensors.outputs) };
        CallSpec {
            op: self.op,
            dtype: self.dtype,
            reduce_op: self.reduce_op,
            root: Rank(self.root as u32),
            factor: factor(0),
            inputs: inputs.into(),
            outputs: outputs.into(),
            call_site: None,
            compares: None,
        }
    }

    fn reduced(&self, pieces: &[&[u8]]) -> Vec<u8> {
        on_cpu(self.order, self.reduce_op, self.dtype, pieces, factor)
    }

    /// The expected outputs of `me`, given all ranks' tensors.
    pub(crate) fn expected(&self, me: usize, all: &[Tensors]) -> Vec<Vec<u8>> {
        let root = me == self.root;
        let column = |i: usize| all.iter().map(|t| t.input(i)).collect::<Vec<_>>();
        match self.op {
            Collective::Barrier => vec![],
            Collective::Broadcast if root => vec![],
            Collective::Broadcast => vec![all[self.root].input(0).to_vec()],
            Collective::AllReduce => vec![self.reduced(&column(0))],
            Collective::Reduce if root => vec![self.reduced(&column(0))],
            Collective::Gather if !root => vec![],
            Collective::Reduce => vec![],
            Collective::AllGather | Collective::Gather => {
                column(0).iter().map(|piece| piece.to_vec()).collect()
            }
            Collective::Scatter => vec![all[self.root].input(me).to_vec()],
            Collective::ReduceScatter => vec![self.reduced(&column(me))],
            Collective::AllToAll => column(me).iter().map(|piece| piece.to_vec()).collect(),
            Collective::AllReduceAddRmsNorm => unreachable!("not of c10d"),
        }
    }

    /// Asserts that the outputs of all ranks are as expected.
    pub(crate) fn check(&self, all: &[Tensors]) {
        let (op, count, dtype, n) = (self.op, self.count, self.dtype.name(), all.len());
        for (me, tensors) in all.iter().enumerate() {
            for (i, expected) in self.expected(me, all).iter().enumerate() {
                let wrong = tensors.output(i).iter().zip(expected).position(|(a, b)| a != b);
                let what = format!("{op:?} of {count} × {dtype} on rank {me} of {n}, output {i}");
                assert_eq!(wrong, None, "{what}");
            }
        }
    }
}

/// A case of `op` with even lengths of `count` elements; a reduction sums in rank order.
pub(crate) fn case(op: Collective, dtype: DType, count: usize) -> Case {
    Case {
        op,
        dtype,
        reduce_op: ReduceOp::Sum,
        root: count % 2,
        count,
        uneven: false,
        shift: 0,
        order: SumOrder::Rank,
    }
}
