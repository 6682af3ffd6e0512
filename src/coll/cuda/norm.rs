//! Plans of an all-reduce with residual and norm. Pure.

use super::plan::{CUBE_MESH_BYTES, Conditions, Plan};
use super::workspace::layout::UNIT;
use crate::coll::call::{Call, Op};
use crate::coll::norm::{GROUP, Norm, Normed};

/// Threads of a block that norms rows, at most; `THREADS` in `device.cuh`.
const MOST_THREADS: usize = 512;
/// Blocks that norm rows which have been summed, at most.
const ROWS_BLOCKS: usize = 256;

/// The plan for `call`: one kernel where its rows are short and few, else an all-reduce and a kernel for the rows.
pub(super) fn choose(call: &Call, conditions: &Conditions<'_>) -> Plan {
    let Conditions { n, layout, tuning, cube_mesh, .. } = *conditions;
    let Some(norm) = Norm::of(call).filter(|norm| norm.rows > 0) else { return Plan::Nothing };
    let bytes = norm.row_bytes() * norm.rows;
    let blocks = norm.rows.min(tuning.blocks);
    let fits = norm.rows.div_ceil(blocks) * (norm.row_bytes() / UNIT) <= layout.sentinel_units();
    // Sums on a hybrid cube mesh are added up in another order, which is that of the separate steps there.
    let on_edges = cube_mesh && bytes <= CUBE_MESH_BYTES;
    if n > 1 && !on_edges && bytes <= tuning.one_shot_bytes && fits {
        return Plan::NormOneShot { blocks: blocks as u32 };
    }
    Plan::NormRows { blocks: norm.rows.min(ROWS_BLOCKS) as u32 }
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
    use crate::coll::cuda::tuning::Tuning;
    use crate::coll::cuda::workspace::layout::Layout;
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
                        let plan = crate::coll::cuda::plan::choose(&call, &conditions);
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
