//! The all-reduce along the edges of a hybrid cube mesh, on host threads: its bits, its edges, and
//! its coexistence with other calls on the same lines.

use crate::calls::{Case, Random, Tensors, case, factor, on_cpu};
use crate::host::{Host, at_once};
use std::time::Duration;
use symm::coll::call::Collective;
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::topo::graph::CubeMesh;
use symm::topo::mesh::NvlMesh;

const N: usize = 8;

/// The cube mesh whose rank i is the GPU `label[i]` of a DGX-1.
fn mesh(label: [usize; N]) -> CubeMesh {
    let mut rows = vec![vec![0; N]; N];
    for (a, b) in (0..N).flat_map(|a| (0..N).map(move |b| (a, b))) {
        if a != b && (a / 4 == b / 4 || a % 4 == b % 4) {
            rows[label[a]][label[b]] = 1;
        }
    }
    CubeMesh::of(&NvlMesh::new(&rows).unwrap()).expect("a cube mesh")
}

fn straight() -> CubeMesh {
    mesh([0, 1, 2, 3, 4, 5, 6, 7])
}

fn reduced(op: ReduceOp, dtype: DType, pieces: &[&[u8]]) -> Vec<u8> {
    on_cpu(SumOrder::Rank, op, dtype, pieces, |_| factor(0))
}

/// The expected result: each quad's sum in rank order, rounded, and then the sum of both quads, the
/// quad with rank 0 first. An average divides at the end.
fn expected(mesh: &CubeMesh, op: ReduceOp, dtype: DType, inputs: &[&[u8]]) -> Vec<u8> {
    let first = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
    let last = if op == ReduceOp::PremulSum { ReduceOp::Sum } else { op };
    let halves =
        mesh.quad.map(|quad| reduced(first, dtype, &quad.map(|rank| inputs[rank as usize])));
    let mut pieces = vec![&halves[0][..], &halves[1][..]];
    // Six neutral values, so that the average divides by eight: -0 if the type has it, since -0 + 0
    // is not -0.
    let signed = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
    let nothing: Vec<u8> = (0..halves[0].len())
        .map(|i| if signed && i % dtype.size() == dtype.size() - 1 { 0x80 } else { 0 })
        .collect();
    if op == ReduceOp::Avg {
        pieces.resize(N, &nothing);
    }
    reduced(last, dtype, &pieces)
}

/// `count` elements: any bytes for integers; for floats, numbers whose reduction in any other order
/// gives other bits.
fn elements(dtype: DType, op: ReduceOp, count: usize, seed: u64) -> Vec<u8> {
    const FINITE: [f32; 6] = [1e30, -1e30, 1.0, 3.0e-39, -0.0, -1.000_001];
    let mut random = Random((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut number = || match random.below(1 << 40) {
        // The minimum of 0 and -0 is the first of them, so its sign reveals the order.
        chance if op == ReduceOp::Min => [0.0, -0.0][chance % 2],
        // Only a few NaNs, because they would hide everything else.
        chance if chance.is_multiple_of(64) => [f32::NAN, f32::INFINITY][chance / 64 % 2],
        chance => FINITE[chance % 6],
    };
    if dtype == DType::F64 {
        (0..count).flat_map(|_| f64::from(number()).to_le_bytes()).collect()
    } else if dtype == DType::F32 {
        (0..count).flat_map(|_| number().to_le_bytes()).collect()
    } else if dtype == DType::BF16 {
        (0..count).flat_map(|_| number().to_le_bytes()[2..].to_vec()).collect()
    } else {
        let end = if dtype == DType::Bool { 2 } else { 256 };
        (0..count * dtype.size()).map(|_| random.below(end) as u8).collect()
    }
}

/// One call of all ranks.
struct Step {
    case: Case,
    in_place: bool,
    /// Number of blocks that replaces the planned number, to force more rounds.
    blocks: Option<u32>,
}

impl Step {
    fn all_reduce(dtype: DType, reduce_op: ReduceOp, count: usize) -> Self {
        Self {
            case: Case { reduce_op, ..case(Collective::AllReduce, dtype, count) },
            in_place: false,
            blocks: None,
        }
    }

    fn tensors(&self, me: usize, number: usize) -> Tensors {
        let Case { dtype, reduce_op, count, shift, .. } = self.case;
        let mut tensors = Tensors { in_place: self.in_place, ..self.case.tensors(me, N, 1) };
        for (i, data) in tensors.inputs.iter_mut().enumerate() {
            let seed = ((number * N + me) * 64 + i) as u64;
            data[shift..].copy_from_slice(&elements(dtype, reduce_op, count, seed));
        }
        tensors
    }

    fn run(&self, host: &Host, me: usize, number: u64, tensors: &Tensors) {
        let call = self.case.call(tensors);
        if let Some(mut launch) = host.prepare(me, number, &call) {
            launch.grid.blocks = self.blocks.unwrap_or(launch.grid.blocks);
            host.run(me, &launch, call.dtype, call.reduce_op);
        }
    }
}

/// Runs `steps` back to back on every rank and checks each result; returns the algorithms that ran
/// them.
fn run(mesh: &CubeMesh, steps: &[Step]) -> Vec<&'static str> {
    let host = Host::with_mesh(mesh.clone());
    let made = |(i, step): (usize, &Step)| (0..N).map(|me| step.tensors(me, i)).collect();
    let tensors: Vec<Vec<Tensors>> = steps.iter().enumerate().map(made).collect();
    at_once(0..N, |me| {
        for (i, (step, tensors)) in steps.iter().zip(&tensors).enumerate() {
            step.run(&host, me, i as u64, &tensors[me]);
        }
    });
    host.assert_well();
    for (i, (step, tensors)) in steps.iter().zip(&tensors).enumerate() {
        let given: Vec<Tensors> = made((i, step));
        let Case { op, dtype, reduce_op, count, .. } = step.case;
        let results = |me: usize| {
            let places = if step.in_place { &tensors[me].inputs } else { &tensors[me].outputs };
            places.iter().map(|place| &place[step.case.shift..]).collect::<Vec<_>>()
        };
        for me in 0..N {
            let wanted = if op == Collective::AllReduce {
                vec![expected(
                    mesh,
                    reduce_op,
                    dtype,
                    &given.iter().map(|tensors| tensors.input(0)).collect::<Vec<_>>(),
                )]
            } else {
                step.case.expected(me, &given)
            };
            for (j, (got, wanted)) in results(me).into_iter().zip(&wanted).enumerate() {
                let wrong = got.iter().zip(wanted).position(|(a, b)| a != b);
                let (dtype, how) = (dtype.name(), reduce_op.name());
                assert_eq!(
                    wrong, None,
                    "call {i}, {op:?} {how} of {count} × {dtype} on rank {me}, output {j}; {mesh:?}"
                );
            }
            if op == Collective::AllReduce {
                assert_eq!(results(me), results(0), "rank {me} has other bits than rank 0");
            }
        }
    }
    steps
        .iter()
        .zip(&tensors)
        .map(|(step, tensors)| host.plan(0, &step.case.call(&tensors[0])).name())
        .collect()
}

const TYPES: [(DType, ReduceOp); 13] = [
    (DType::F32, ReduceOp::Sum),
    (DType::F32, ReduceOp::Avg),
    (DType::F32, ReduceOp::PremulSum),
    (DType::BF16, ReduceOp::Sum),
    (DType::BF16, ReduceOp::Avg),
    (DType::BF16, ReduceOp::Min),
    (DType::F16, ReduceOp::Product),
    (DType::F64, ReduceOp::Max),
    (DType::I64, ReduceOp::Product),
    (DType::I8, ReduceOp::Avg),
    (DType::U8, ReduceOp::BitXor),
    (DType::Bool, ReduceOp::Sum),
    (DType::F8E4M3FN, ReduceOp::Sum),
];

#[test]
fn every_rank_gets_the_bits_of_the_documented_order() {
    let mut steps = Vec::new();
    for (i, (dtype, op)) in TYPES.into_iter().enumerate() {
        let short = Step::all_reduce(dtype, op, [1, 37, 515][i % 3]);
        steps.push(Step { case: Case { shift: dtype.size(), ..short.case }, ..short });
        steps.push(Step {
            in_place: i % 2 == 0,
            ..Step::all_reduce(dtype, op, 9000 / dtype.size())
        });
    }
    assert!(run(&straight(), &steps).iter().all(|name| *name == "cube_mesh"));
}

#[test]
fn messages_longer_than_the_lines_take_several_rounds() {
    let long = |count, blocks| Step {
        blocks: Some(blocks),
        ..Step::all_reduce(DType::BF16, ReduceOp::Sum, count)
    };
    // Rounds of 4 KiB with one block and of 8 KiB with two. The last round of some calls has no
    // data for the second block.
    let rounds = [(2048, 1), (2049, 1), (6000, 1), (9000, 2), (8195, 2), (3, 2), (6000, 1)];
    run(&straight(), &rounds.map(|(count, blocks)| long(count, blocks)));
}

#[test]
fn labels_do_not_matter() {
    let mut random = Random(77);
    for _ in 0..12 {
        let mut label = [0, 1, 2, 3, 4, 5, 6, 7];
        (1..N).for_each(|i| label.swap(i, random.below(i + 1)));
        let sum = Step::all_reduce(DType::F32, ReduceOp::Sum, 100);
        run(&mesh(label), &[sum, Step::all_reduce(DType::BF16, ReduceOp::Avg, 70)]);
    }
}

#[test]
fn calls_that_hear_from_all_and_calls_that_hear_from_neighbours_take_turns() {
    let mut random = Random(5);
    let others = [
        Collective::Barrier,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
    ];
    let mut step = |_| {
        let (rounds, count) = (random.below(4) == 0, 1 + random.below(60));
        let long = if rounds { count + 1024 } else { count };
        let cube = Step {
            blocks: rounds.then_some(1),
            ..Step::all_reduce(DType::F32, ReduceOp::Sum, long)
        };
        let other = case(random.of(&others), DType::I32, count);
        if random.below(2) == 0 { cube } else { Step { case: other, blocks: None, ..cube } }
    };
    let steps: Vec<Step> = (0..150).map(&mut step).collect();
    let names = run(&mesh([3, 0, 6, 1, 7, 2, 5, 4]), &steps);
    for name in ["cube_mesh", "exchange_low_latency", "reduce_low_latency", "exchange_mixed"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert!(names.windows(2).filter(|pair| pair[0] != pair[1]).count() > 50, "{names:?}");
}

#[test]
fn a_rank_that_never_comes_is_named_by_its_quad_and_among_its_quad_by_the_other() {
    const MISSING: usize = 6;
    for label in [[0, 1, 2, 3, 4, 5, 6, 7], [6, 0, 3, 5, 1, 2, 4, 7]] {
        let mesh = mesh(label);
        let mut host = Host::with_mesh(mesh.clone());
        host.timeout = Duration::from_millis(400);
        let others = (0..N).filter(|&me| me != MISSING);
        at_once(others.clone(), |me| {
            let step = Step::all_reduce(DType::F32, ReduceOp::Sum, 50);
            step.run(&host, me, 77, &step.tensors(me, 1));
        });
        assert!(host.longest() < Duration::from_secs(60), "{:?}", host.longest());
        let quad = mesh.quad_of(MISSING as u32);
        for me in others {
            let report = &host.memory[me].report;
            let named: Vec<u32> =
                (0..N as u32).filter(|&rank| report[4 + rank as usize] != 0).collect();
            let right =
                if quad.contains(&(me as u32)) { vec![MISSING as u32] } else { quad.to_vec() };
            assert_eq!((report[0], report[1], named), (1, 77, right), "rank {me}");
        }
    }
}
