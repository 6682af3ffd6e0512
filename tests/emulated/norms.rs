//! Kernels on host threads that sum rows, add them to a residual and normalise them. The results
//! equal the CPU's results bit for bit.

use crate::host::{Host, at_once};
use symm::coll::all_reduce_norm::{Norm, Normed};
use symm::coll::call::{CallSpec, Collective, Span};
use symm::coll::cuda::all_reduce_norm;
use symm::coll::cuda::plan::{CudaPlan, CudaThresholds};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::kernels::cpu::{self, NormRows};
use symm::rank::Rank;

/// Memory of one rank: inputs and outputs, at odd addresses if `shift` is odd.
struct Tensors {
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    shift: usize,
}

impl Tensors {
    /// Rows of `norm`; the input differs between ranks.
    fn new(norm: &Norm, me: usize, shift: usize) -> Self {
        let fill = |elements: usize, seed: usize| {
            let mut data = vec![0u8; shift];
            for i in 0..elements {
                // Numbers between -4 and 4; few of their sums are exact.
                let value = ((i * 2_654_435_761 + seed * 40_503) % 4093) as f32 / 512.0 - 4.0;
                let bits = value.to_bits();
                if norm.dtype == DType::F32 {
                    data.extend(bits.to_le_bytes());
                } else {
                    // Truncated, not converted, because any bits will do.
                    let mask = if norm.dtype == DType::F16 { 0xbfff } else { 0xffff };
                    data.extend(((bits >> 16) as u16 & mask).to_le_bytes());
                }
            }
            data
        };
        let all = norm.rows * norm.hidden;
        let mut inputs = vec![fill(all, me + 1), fill(all, 100), fill(norm.hidden, 101)];
        if norm.normed == Normed::Static {
            let mut scale = vec![0u8; shift.next_multiple_of(4)];
            scale.extend(0.03f32.to_le_bytes());
            inputs.push(scale);
        }
        let lengths = [
            norm.normed_bytes() * norm.rows,
            norm.row_bytes() * norm.rows,
            norm.scale_bytes() * norm.rows,
        ];
        let outputs = if norm.normed == Normed::Dynamic { 3 } else { 2 };
        Self {
            inputs,
            outputs: lengths[..outputs].iter().map(|bytes| vec![0xEE; shift + bytes]).collect(),
            shift,
        }
    }

    fn call(&self, norm: &Norm) -> CallSpec<'static> {
        let spans = |data: &[Vec<u8>], numbers: usize| {
            let of = |(i, data): (usize, &Vec<u8>)| {
                // Tensors from index `numbers` on hold 32-bit scales, which are aligned.
                let shift = if i >= numbers { self.shift.next_multiple_of(4) } else { self.shift };
                Span { addr: data.as_ptr() as usize + shift, bytes: data.len() - shift }
            };
            data.iter().enumerate().map(of).collect::<Vec<_>>()
        };
        let mut outputs = spans(&self.outputs, 3);
        if let Some(scales) = outputs.get_mut(2) {
            scales.addr -= scales.addr % 4;
        }
        CallSpec {
            op: Collective::AllReduceAddRmsNorm,
            dtype: norm.dtype,
            reduce_op: ReduceOp::Sum,
            root: Rank(0),
            factor: f64::from(norm.eps),
            inputs: spans(&self.inputs, 3).into(),
            outputs: outputs.into(),
            call_site: None,
            compares: None,
        }
    }
}

/// The expected outputs of every rank.
fn expected(order: SumOrder, norm: &Norm, ranks: &[Tensors]) -> Vec<Vec<u8>> {
    let wanted = Tensors::new(norm, 0, ranks[0].shift);
    let call = wanted.call(norm);
    let sources: Vec<*const u8> =
        ranks.iter().map(|rank| rank.call(norm).inputs[0].ptr().cast_const()).collect();
    let memory = NormRows {
        sources: &sources,
        order,
        residual: call.inputs[1].ptr(),
        weight: call.inputs[2].ptr(),
        scale: call.inputs.get(3).map_or(std::ptr::null(), |scale| scale.ptr().cast_const()),
        normed: call.outputs[0].ptr(),
        sum: call.outputs[1].ptr(),
        scales: call.outputs.get(2).map_or(std::ptr::null_mut(), |scales| scales.ptr()),
    };
    // SAFETY: all tensors have the rows of `norm`.
    unsafe { cpu::add_rms_norm(norm, norm.rows, &memory) };
    wanted.outputs
}

/// Runs `norms` one after another, `rounds` times, each by a plan of this `name`: in one kernel
/// (`norm_one_shot`) or after an all-reduce (`norm_rows`).
fn run(order: SumOrder, n: usize, norms: &[Norm], shift: usize, rounds: u64, name: &str) {
    let tuning = CudaThresholds { overlap: 0, ..CudaThresholds::of(n) };
    let tuning = if name == "norm_one_shot" {
        CudaThresholds { one_shot_bytes: 1 << 20, ..tuning }
    } else {
        CudaThresholds { one_shot_bytes: 0, lanes: 2, threads: 8, ..tuning }
    };
    let host = Host::with_tuning(n, tuning).summing(order);
    let tensors: Vec<Vec<Tensors>> =
        norms.iter().map(|norm| (0..n).map(|me| Tensors::new(norm, me, shift)).collect()).collect();
    at_once(0..n, |me| {
        for round in 0..rounds {
            for (i, (norm, tensors)) in (0..).zip(norms.iter().zip(&tensors)) {
                let (number, call) = (round * norms.len() as u64 + i, tensors[me].call(norm));
                if let CudaPlan::NormRows { .. } = host.plan(me, &call) {
                    host.call(me, number, &all_reduce_norm::reduction(&call));
                }
                host.call(me, number, &call);
            }
        }
    });
    host.assert_well();
    for (norm, tensors) in norms.iter().zip(&tensors) {
        let served = host.plan(0, &tensors[0].call(norm)).name();
        assert!([name, "nothing"].contains(&served), "{served} for {norm:?}");
        let wanted = expected(order, norm, tensors);
        for (me, tensors) in tensors.iter().enumerate() {
            for (at, (got, wanted)) in tensors.outputs.iter().zip(&wanted).enumerate() {
                let wrong = got.iter().zip(wanted).position(|(got, wanted)| got != wanted);
                assert_eq!(wrong, None, "output {at} of {norm:?} on rank {me} of {n}");
            }
        }
    }
}

/// Numbers and lengths of rows. One block of eight threads normalises a row of `ROWS`; clusters of
/// 2 and 4 such blocks share a row of `LONG_ROWS`.
const ROWS: [(usize, usize); 6] = [(1, 8), (3, 64), (5, 200), (70, 16), (2, 256), (0, 64)];
const LONG_ROWS: [(usize, usize); 2] = [(3, 400), (1, 1000)];

/// Norms with every kind of normalised output for each of `rows`, which are pairs of a number of
/// rows and their length.
fn mixture(dtype: DType, rows: &[(usize, usize)]) -> Vec<Norm> {
    let mut norms = Vec::new();
    for &(rows, hidden) in rows {
        for normed in [Normed::Same, Normed::Static, Normed::Dynamic] {
            norms.push(Norm { dtype, hidden, rows, eps: 1e-5, normed });
        }
    }
    norms
}

#[test]
fn in_one_kernel() {
    for (n, dtype, shift) in [(2, DType::BF16, 0), (3, DType::F32, 4), (2, DType::F16, 2)] {
        let norms = mixture(dtype, &[&ROWS[..], &LONG_ROWS].concat());
        run(SumOrder::Rank, n, &norms, shift, 2, "norm_one_shot");
    }
}

#[test]
fn sums_of_trees() {
    for name in ["norm_one_shot", "norm_rows"] {
        run(SumOrder::Tree, 4, &mixture(DType::BF16, &ROWS), 0, 1, name);
    }
}

#[test]
fn after_an_all_reduce() {
    for (n, dtype) in [(2, DType::BF16), (3, DType::F32)] {
        run(SumOrder::Rank, n, &mixture(dtype, &ROWS), 0, 2, "norm_rows");
    }
}
