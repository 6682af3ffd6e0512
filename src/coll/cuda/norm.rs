//! How many blocks norm how many rows after, or in, an all-reduce. Pure.

use super::tuning::Tuning;
use super::workspace::layout::{Layout, UNIT};
use crate::coll::call::{Call, Op};
use crate::coll::norm::{GROUP, Norm, Normed};

/// Threads of a block that norms rows, at most; `THREADS` in `device.cuh`.
const MOST_THREADS: usize = 512;
/// Blocks that norm rows which have been summed, at most.
const ROWS_BLOCKS: usize = 256;

/// Blocks of the kernel that serves all of `norm` among `n` ranks; `None`: its rows are too long or too many for one.
pub(super) fn one_shot_blocks(norm: &Norm, n: usize, layout: &Layout, tuning: &Tuning) -> Option<u32> {
    let blocks = norm.rows.min(tuning.blocks);
    let fits = norm.rows.div_ceil(blocks) * (norm.row_bytes() / UNIT) <= layout.sentinel_units();
    (n > 1 && norm.row_bytes() * norm.rows <= tuning.one_shot_bytes && fits).then_some(blocks as u32)
}

/// Blocks of the kernel that norms `rows` rows which have been summed.
pub(super) fn rows_blocks(rows: usize) -> u32 {
    rows.min(ROWS_BLOCKS) as u32
}

/// The all-reduce of `call` before its rows are normed: to where the normed rows go, or where those are shorter the sums.
pub fn reduction(call: &Call) -> Call {
    let same = Norm::of(call).is_none_or(|norm| norm.normed == Normed::Same);
    let to = call.outputs[usize::from(!same)];
    Call { op: Op::AllReduce, factor: 1.0, inputs: vec![call.inputs[0]], outputs: vec![to], ..call.clone() }
}

/// Threads of a block: one for each group of a row, as many as a power of two.
pub(super) fn threads(norm: &Norm) -> u32 {
    (norm.hidden / GROUP).next_power_of_two().clamp(32, MOST_THREADS) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::cuda::plan::{Conditions, Plan, choose};
    use crate::coll::norm::{MAX_HIDDEN, tests::call};
    use crate::dtype::DType;

    #[test]
    fn rows_that_have_room_in_the_slots_take_one_kernel() {
        for n in [1, 2, 4, 8] {
            let (layout, tuning) = (Layout::new(n, 512 << 20).expect("fits"), Tuning::of(n));
            let conditions = Conditions { n, layout: &layout, tuning: &tuning, cube_mesh: false, zero_copy: false };
            for dtype in [DType::BF16, DType::F32] {
                for hidden in [8, 4096, 8192, MAX_HIDDEN] {
                    for rows in [0, 1, 3, 64, 65, 1000] {
                        let call = call(dtype, rows, hidden, 1e-6, Normed::Same);
                        let norm = Norm::of(&call).expect("a norm");
                        assert!(threads(&norm) as usize * 4 * GROUP >= hidden && threads(&norm).is_multiple_of(32));
                        let plan = choose(&call, &conditions);
                        if let Plan::NormOneShot { blocks } = plan {
                            let blocks = blocks as usize;
                            assert!(n > 1 && (1..=tuning.blocks.min(rows)).contains(&blocks));
                            assert!(rows.div_ceil(blocks) * norm.row_bytes() <= layout.sentinel_units() * UNIT);
                        } else if let Plan::NormRows { blocks } = plan {
                            assert!((1..=ROWS_BLOCKS.min(rows)).contains(&(blocks as usize)));
                        } else {
                            assert_eq!((plan, rows), (Plan::Nothing, 0));
                        }
                    }
                }
            }
        }
        let (layout, tuning) = (Layout::new(2, 512 << 20).expect("fits"), Tuning::of(2));
        let conditions = Conditions { n: 2, layout: &layout, tuning: &tuning, cube_mesh: false, zero_copy: false };
        let plan = |call: &Call| choose(call, &conditions);
        assert_eq!(plan(&call(DType::BF16, 1, 8192, 0.0, Normed::Same)), Plan::NormOneShot { blocks: 1 });
        assert_eq!(plan(&call(DType::BF16, 64, 8192, 0.0, Normed::Dynamic)), Plan::NormOneShot { blocks: 64 });
        assert_eq!(plan(&call(DType::BF16, 65, 8192, 0.0, Normed::Same)), Plan::NormRows { blocks: 65 });
        let mesh = Conditions { cube_mesh: true, ..conditions };
        assert!(matches!(choose(&call(DType::BF16, 1, 8192, 0.0, Normed::Same), &mesh), Plan::NormRows { .. }));
    }

    #[test]
    fn sums_go_where_the_norm_takes_them_from() {
        let at = |normed| {
            let mut call = call(DType::BF16, 2, 64, 0.0, normed);
            call.outputs.iter_mut().enumerate().for_each(|(i, span)| span.addr = i + 1);
            let reduction = reduction(&call);
            (reduction.outputs[0].addr, reduction.outputs[0].bytes, reduction.outputs.len())
        };
        assert_eq!([Normed::Same, Normed::Static, Normed::Dynamic].map(at), [(1, 256, 1), (2, 256, 1), (2, 256, 1)]);
    }
}
