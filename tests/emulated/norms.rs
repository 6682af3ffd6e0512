//! Rows that are summed, added to a residual and normalised by kernels on host threads: the bits
//! equal the CPU's.

use crate::host::Host;
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
                // Small numbers of either sign; some are large, and few sums are exact.
                let value = ((i * 2_654_435_761 + seed * 40_503) % 4093) as f32 / 512.0 - 4.0;
                let bits = value.to_bits();
                if norm.dtype == DType::F32 {
                    data.extend(bits.to_le_bytes());
                } else {
                    // Truncated, not converted, because any bits will do.
                    data.extend(
                        ((bits >> 16) as u16
                            & if norm.dtype == DType::F16 { 0xbfff } else { 0xffff })
                        .to_le_bytes(),
                    );
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
            *scales = Span {
                addr: scales.addr.next_multiple_of(4)
                    - 4 * usize::from(!scales.addr.is_multiple_of(4)),
                ..*scales
            };
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

/// Runs `norms` one after another, `rounds` times; returns the names of their plans.
fn run(
    n: usize,
    norms: &[Norm],
    shift: usize,
    rounds: u64,
    tuning: CudaThresholds,
) -> Vec<&'static str> {
    run_in(SumOrder::Rank, n, norms, shift, rounds, tuning)
}

fn run_in(
    order: SumOrder,
    n: usize,
    norms: &[Norm],
    shift: usize,
    rounds: u64,
    tuning: CudaThresholds,
) -> Vec<&'static str> {
    let host = Host::with_tuning(n, tuning).summing(order);
    let tensors: Vec<Vec<Tensors>> =
        norms.iter().map(|norm| (0..n).map(|me| Tensors::new(norm, me, shift)).collect()).collect();
    std::thread::scope(|scope| {
        for me in 0..n {
            let (host, tensors) = (&host, &tensors);
            scope.spawn(move || {
                for round in 0..rounds {
                    for (i, (norm, tensors)) in norms.iter().zip(tensors).enumerate() {
                        let call = tensors[me].call(norm);
                        call.validate(Rank(me as u32), n).expect("valid");
                        let context =
                            host.context(me, round * norms.len() as u64 + i as u64, Some(&call));
                        let plan = host.plan(me, &call);
                        if let CudaPlan::NormRows { .. } = plan {
                            let sum = all_reduce_norm::reduction(&call);
                            if let Some(launch) = context.prepare(&sum, host.plan(me, &sum)) {
                                host.run(me, &launch, norm.dtype, ReduceOp::Sum);
                            }
                        }
                        if let Some(launch) = context.prepare(&call, plan) {
                            host.run(me, &launch, norm.dtype, ReduceOp::Sum);
                        }
                    }
                }
            });
        }
    });
    assert!(host.is_well(), "a kernel gave up");
    for (norm, tensors) in norms.iter().zip(&tensors) {
        let wanted = expected(order, norm, tensors);
        for (me, tensors) in tensors.iter().enumerate() {
            for (at, (got, wanted)) in tensors.outputs.iter().zip(&wanted).enumerate() {
                let wrong = got.iter().zip(wanted).position(|(got, wanted)| got != wanted);
                assert_eq!(wrong, None, "output {at} of {norm:?} on rank {me} of {n}");
            }
        }
    }
    norms
        .iter()
        .zip(&tensors)
        .map(|(norm, tensors)| host.plan(0, &tensors[0].call(norm)).name())
        .collect()
}

/// Numbers and lengths of rows: for eight threads, and for clusters of 2 and 4 such blocks.
const ROWS: [(usize, usize); 6] = [(1, 8), (3, 64), (5, 200), (70, 16), (2, 256), (0, 64)];
const LONG_ROWS: [(usize, usize); 2] = [(3, 400), (1, 1000)];

/// Every form of `rows`, which are pairs of a number of rows and their length.
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
    let tuning = CudaThresholds { one_shot_bytes: 1 << 20, overlap: 0, ..CudaThresholds::of(2) };
    for (n, dtype, shift) in [(2, DType::BF16, 0), (3, DType::F32, 4), (2, DType::F16, 2)] {
        let served = run(n, &mixture(dtype, &[&ROWS[..], &LONG_ROWS].concat()), shift, 2, tuning);
        assert!(
            served.iter().all(|name| ["norm_one_shot", "nothing"].contains(name)),
            "{served:?}"
        );
    }
}

#[test]
fn sums_of_trees() {
    let one = CudaThresholds { one_shot_bytes: 1 << 20, overlap: 0, ..CudaThresholds::of(4) };
    let other = CudaThresholds {
        one_shot_bytes: 0,
        lanes: 2,
        threads: 8,
        overlap: 0,
        ..CudaThresholds::of(4)
    };
    for (tuning, name) in [(one, "norm_one_shot"), (other, "norm_rows")] {
        let served = run_in(SumOrder::Tree, 4, &mixture(DType::BF16, &ROWS), 0, 1, tuning);
        assert!(served.contains(&name), "{served:?}");
    }
}

#[test]
fn after_an_all_reduce() {
    let tuning = CudaThresholds {
        one_shot_bytes: 0,
        lanes: 2,
        threads: 8,
        overlap: 0,
        ..CudaThresholds::of(2)
    };
    for (n, dtype) in [(2, DType::BF16), (3, DType::F32)] {
        let served = run(n, &mixture(dtype, &ROWS), 0, 2, tuning);
        assert!(served.iter().all(|name| ["norm_rows", "nothing"].contains(name)), "{served:?}");
    }
}
