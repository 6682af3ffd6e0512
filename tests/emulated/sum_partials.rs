//! The sum of nodes' partial results by its CUDA kernel, compared bit by bit with the CPU's
//! reduction.

use crate::program::{Program, numbers};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::internode::cuda::cast::{self, Cast};
use symm::internode::cuda::sum::{NAMES, PartialsSum};
use symm::kernels::cpu::{self, InputElements};
use symm::kernels::cuda::driver::Grid;
use symm::mem::span::Span;
use symm::node_map::{NodeMap, RankLocation};

const BLOCKS: u32 = 3;
const THREADS: u32 = 4;
/// The content of the bytes around a result.
const UNTOUCHED: u8 = 0xa5;

fn layout(nodes: &[u8]) -> NodeMap {
    let place = |node: &u8| RankLocation::on(&format!("node{node}"));
    NodeMap::of(&nodes.iter().map(place).collect::<Vec<_>>())
}

fn check(nodes: &[u8], dtype: DType, op: ReduceOp, counts: &[usize], begin: usize) {
    check_in(SumOrder::Rank, nodes, dtype, op, counts, begin);
}

fn check_in(
    order: SumOrder,
    nodes: &[u8],
    dtype: DType,
    op: ReduceOp,
    counts: &[usize],
    begin: usize,
) {
    let layout = layout(nodes);
    let outer = |bytes| {
        PartialsSum { from: 0, stride: 16, to: Span { addr: 0, bytes }, dtype, op }
            .args(&layout)
            .expect("aligned")
            .0
    };
    let program = Program::build_in(order, NAMES.0, 2, Some(dtype), Some(outer(16)));
    for &count in counts {
        let bytes = count * dtype.size();
        let partials: Vec<Vec<u128>> =
            (0..layout.num_nodes()).map(|node| numbers(node, bytes, dtype)).collect();
        let from = partials.concat();
        let mut to = vec![UNTOUCHED; bytes + begin + 16];
        let sum = PartialsSum {
            from: from.as_ptr().addr(),
            stride: bytes.next_multiple_of(16),
            to: Span { addr: to.as_mut_ptr().addr() + begin, bytes },
            dtype,
            op,
        };
        let (outer, args) = sum.args(&layout).expect("aligned");
        let source = |(part, &factor): (&Vec<u128>, &f64)| InputElements {
            ptr: part.as_ptr().cast(),
            factor,
        };
        let sources: Vec<InputElements> = partials.iter().zip(&args.factor).map(source).collect();
        let mut expected = vec![0u8; bytes];
        // SAFETY: every partial result and the sum have `bytes`, a multiple of the element.
        unsafe {
            cpu::reduce_partials(
                order,
                outer,
                dtype,
                expected.as_mut_ptr(),
                &sources,
                count,
                args.divisor as usize,
            )
        };
        // SAFETY: `repr(C)` numbers without padding.
        let args =
            unsafe { std::slice::from_raw_parts((&raw const args).cast(), size_of_val(&args)) };
        // SAFETY: partial results and sum live until the kernel has ended, and it writes only the
        // sum.
        unsafe { program.launch(NAMES.1, 0, Grid::new(BLOCKS, THREADS), args) };
        let about = format!("{op:?} of {count} {dtype:?} on {nodes:?}");
        assert_eq!(to[begin..begin + bytes], expected, "{about}");
        let around = to[..begin].iter().chain(&to[begin + bytes..]);
        assert!(
            around.into_iter().all(|&byte| byte == UNTOUCHED),
            "{about}: written beside the result"
        );
    }
}

#[test]
fn sums_in_the_order_of_nodes_at_every_length() {
    let counts = [0, 1, 7, 8, 9, 16 * 61 + 3];
    check(&[0, 1], DType::BF16, ReduceOp::Sum, &counts, 0);
    check(&[0, 0, 1, 2, 3, 4], DType::F32, ReduceOp::Sum, &counts, 4);
    check(&[0, 1, 2], DType::F16, ReduceOp::Max, &counts, 2);
}

#[test]
fn averages_divide_once_and_weigh_uneven_nodes() {
    let counts = [1, 100];
    check(&[0, 1], DType::BF16, ReduceOp::Avg, &counts, 0);
    check(&[0, 0, 0, 1], DType::BF16, ReduceOp::Avg, &counts, 0);
    check(&[0, 0, 0, 1, 2], DType::I8, ReduceOp::Avg, &counts, 1);
    check(&[0, 0, 1], DType::C64, ReduceOp::Avg, &counts, 0);
    check(&[0, 1, 2], DType::I64, ReduceOp::Product, &counts, 0);
    check(&[0, 1, 2], DType::F64, ReduceOp::Min, &counts, 0);
}

#[test]
fn trees_of_nodes() {
    let counts = [1, 9, 16 * 61 + 3];
    for nodes in [4, 5, 7, 8, 13] {
        let nodes: Vec<u8> = (0..nodes).collect();
        check_in(SumOrder::Tree, &nodes, DType::F32, ReduceOp::Sum, &counts, 4);
        check_in(SumOrder::Tree, &nodes, DType::BF16, ReduceOp::Avg, &counts, 0);
    }
    check_in(SumOrder::Tree, &[0, 1, 2, 3], DType::F64, ReduceOp::Product, &counts, 0);
}

fn check_cast(dtype: DType, count: usize, begin: usize) {
    let program = Program::build(cast::NAMES.0, 2, Some(dtype), None);
    let (bytes, size) = (count * dtype.size(), dtype.size() * begin);
    let narrow = numbers(1, bytes, dtype);
    // SAFETY: bytes of numbers.
    let given = unsafe { std::slice::from_raw_parts(narrow.as_ptr().cast::<u8>(), bytes) };
    let moved: Vec<u8> =
        std::iter::repeat_n(UNTOUCHED, size).chain(given.iter().copied()).collect();
    let (mut expected, mut wide) =
        (vec![0u8; 4 * count], vec![0u128; (4 * count).div_ceil(16) + 1]);
    let span = |addr: usize, bytes: usize| Span { addr, bytes };
    let run = |cast: Cast, kernel: &str| {
        let args = cast.args();
        // SAFETY: `repr(C)` numbers without padding.
        let args =
            unsafe { std::slice::from_raw_parts((&raw const args).cast(), size_of_val(&args)) };
        // SAFETY: both sides live until the kernel has ended, and it writes only the copies.
        unsafe { program.launch(kernel, 0, Grid::new(BLOCKS, THREADS), args) }
    };
    let about = format!("{count} {dtype:?} from element {begin}");
    let [widens, rounds] = cast::NAMES.1;
    run(
        Cast {
            from: span(moved.as_ptr().addr() + size, bytes),
            to: span(wide.as_mut_ptr().addr(), 4 * count),
            dtype,
            widens: true,
        },
        widens,
    );
    // SAFETY: buffers of `count` elements each.
    unsafe { cpu::widen(dtype, expected.as_mut_ptr(), given.as_ptr(), count) };
    // SAFETY: bytes of numbers.
    let got = unsafe { std::slice::from_raw_parts(wide.as_ptr().cast::<u8>(), 16 * wide.len()) };
    assert_eq!(got[..4 * count], expected, "widened: {about}");
    assert!(got[4 * count..].iter().all(|&byte| byte == 0), "written beside: {about}");

    let floats = numbers(2, 4 * count, DType::F32);
    let (mut rounded, mut to) = (vec![0u8; bytes], vec![UNTOUCHED; size + bytes + 16]);
    run(
        Cast {
            from: span(floats.as_ptr().addr(), 4 * count),
            to: span(to.as_mut_ptr().addr() + size, bytes),
            dtype,
            widens: false,
        },
        rounds,
    );
    // SAFETY: buffers of `count` elements each.
    unsafe { cpu::narrow(dtype, rounded.as_mut_ptr(), floats.as_ptr().cast(), count) };
    assert_eq!(to[size..size + bytes], rounded, "rounded: {about}");
    assert!(
        to[..size].iter().chain(&to[size + bytes..]).all(|&byte| byte == UNTOUCHED),
        "written beside: {about}"
    );
}

#[test]
fn floats_are_widened_and_rounded_as_on_the_node() {
    for (dtype, begin) in [(DType::BF16, 0), (DType::F16, 3), (DType::F8E4M3FN, 1)] {
        check_cast(dtype, 16 * 61 + 3, begin);
    }
    check_cast(DType::BF16, 1, 1);
}
