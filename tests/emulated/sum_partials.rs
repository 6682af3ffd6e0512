//! The CUDA kernel that sums the partial results of nodes, compared bit by bit with the CPU's
//! reduction.

use crate::program::{Program, bytes_of, numbers};
use symm::dtype::{DType, ReduceOp, SumOrder};
use symm::internode::cuda::cast::{self, Cast};
use symm::internode::cuda::sum::{NAMES, PartialsSum};
use symm::kernels::cpu::{self, InputElements};
use symm::mem::span::Span;
use symm::node_map::{NodeMap, RankLocation};

/// The content of the bytes around a result.
const UNTOUCHED: u8 = 0xa5;

/// Checks sums of each of `counts` elements. The result starts `begin` bytes beyond an aligned
/// address.
fn check(
    order: SumOrder,
    nodes: &[u8],
    dtype: DType,
    op: ReduceOp,
    counts: &[usize],
    begin: usize,
) {
    let place = |node: &u8| RankLocation::on(&format!("node{node}"));
    let layout = NodeMap::of(&nodes.iter().map(place).collect::<Vec<_>>());
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
        let (result, divisor) = (expected.as_mut_ptr(), args.divisor as usize);
        // SAFETY: every partial result and the sum have `bytes` bytes, a multiple of the element
        // size.
        unsafe { cpu::reduce_partials(order, outer, dtype, result, &sources, count, divisor) };
        // SAFETY: partial results and sum live until the kernel has ended, and it writes only the
        // sum.
        unsafe { program.launch_with(NAMES.1, 0, &args) };
        let about = format!("{op:?} of {count} {dtype:?} on {nodes:?}");
        assert_eq!(to[begin..begin + bytes], expected, "{about}");
        let mut around = to[..begin].iter().chain(&to[begin + bytes..]);
        assert!(around.all(|&byte| byte == UNTOUCHED), "{about}: written beside the result");
    }
}

#[test]
fn sums_in_the_order_of_nodes() {
    let (order, lengths) = (SumOrder::Rank, [0, 1, 7, 8, 9, 16 * 61 + 3]);
    check(order, &[0, 1], DType::BF16, ReduceOp::Sum, &lengths, 0);
    check(order, &[0, 0, 1, 2, 3, 4], DType::F32, ReduceOp::Sum, &lengths, 4);
    check(order, &[0, 1, 2], DType::F16, ReduceOp::Max, &lengths, 2);
    // Averages divide only once, and weight each node by its number of ranks.
    let counts = [1, 100];
    check(order, &[0, 1], DType::BF16, ReduceOp::Avg, &counts, 0);
    check(order, &[0, 0, 0, 1], DType::BF16, ReduceOp::Avg, &counts, 0);
    check(order, &[0, 0, 0, 1, 2], DType::I8, ReduceOp::Avg, &counts, 1);
    check(order, &[0, 0, 1], DType::C64, ReduceOp::Avg, &counts, 0);
    check(order, &[0, 1, 2], DType::I64, ReduceOp::Product, &counts, 0);
    check(order, &[0, 1, 2], DType::F64, ReduceOp::Min, &counts, 0);
}

#[test]
fn trees_of_nodes() {
    let (order, counts) = (SumOrder::Tree, [1, 9, 16 * 61 + 3]);
    for nodes in [4, 5, 7, 8, 13] {
        let nodes: Vec<u8> = (0..nodes).collect();
        check(order, &nodes, DType::F32, ReduceOp::Sum, &counts, 4);
        check(order, &nodes, DType::BF16, ReduceOp::Avg, &counts, 0);
    }
    check(order, &[0, 1, 2, 3], DType::F64, ReduceOp::Product, &counts, 0);
}

/// Widens and rounds `count` elements that start `begin` elements beyond an aligned address.
fn check_cast(dtype: DType, count: usize, begin: usize) {
    let program = Program::build(cast::NAMES.0, 2, Some(dtype), None);
    let [widens, rounds] = cast::NAMES.1;
    let (bytes, size) = (count * dtype.size(), dtype.size() * begin);
    let about = format!("{count} {dtype:?} from element {begin}");
    let run = |from: *const u8, from_bytes, to: *mut u8, to_bytes, kernel: &str| {
        let from = Span { addr: from.addr(), bytes: from_bytes };
        let to = Span { addr: to.addr(), bytes: to_bytes };
        let args = Cast { from, to, dtype, widens: kernel == widens }.args();
        // SAFETY: both sides live until the kernel has ended, and it writes only the copies.
        unsafe { program.launch_with(kernel, 0, &args) }
    };

    let narrow = numbers(1, bytes, dtype);
    let given = &bytes_of(&narrow)[..bytes];
    let moved = [&vec![UNTOUCHED; size][..], given].concat();
    let (mut expected, mut wide) =
        (vec![0u8; 4 * count], vec![0u128; (4 * count).div_ceil(16) + 1]);
    run(moved[size..].as_ptr(), bytes, wide.as_mut_ptr().cast(), 4 * count, widens);
    // SAFETY: buffers of `count` elements each.
    unsafe { cpu::widen(dtype, expected.as_mut_ptr(), given.as_ptr(), count) };
    let (got, behind) = bytes_of(&wide).split_at(4 * count);
    assert_eq!(got, expected, "widened: {about}");
    assert!(behind.iter().all(|&byte| byte == 0), "written beside: {about}");

    let floats = numbers(2, 4 * count, DType::F32);
    let (mut rounded, mut to) = (vec![0u8; bytes], vec![UNTOUCHED; size + bytes + 16]);
    run(floats.as_ptr().cast(), 4 * count, to[size..].as_mut_ptr(), bytes, rounds);
    // SAFETY: buffers of `count` elements each.
    unsafe { cpu::narrow(dtype, rounded.as_mut_ptr(), floats.as_ptr().cast(), count) };
    assert_eq!(to[size..size + bytes], rounded, "rounded: {about}");
    let mut around = to[..size].iter().chain(&to[size + bytes..]);
    assert!(around.all(|&byte| byte == UNTOUCHED), "written beside: {about}");
}

#[test]
fn floats_are_widened_and_rounded_as_on_the_node() {
    for (dtype, begin) in [(DType::BF16, 0), (DType::F16, 3), (DType::F8E4M3FN, 1)] {
        check_cast(dtype, 16 * 61 + 3, begin);
    }
    check_cast(DType::BF16, 1, 1);
}
