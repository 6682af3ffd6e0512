//! Number of blocks that normalise rows, in the kernel of the all-reduce or in a second one. Pure.

use super::tuning::CudaThresholds;
use super::workspace::layout::{ChannelLayout, UNIT};
use crate::coll::all_reduce_norm::{GROUP, Norm, Normed};
use crate::coll::call::{CallSpec, Collective};

/// Maximum number of threads in a block that normalises rows; `THREADS` in `device.cuh`.
const MOST_THREADS: usize = 512;
/// Number of accumulators of the squares of a row; `LANES` in `norm.cuh`.
const LANES: usize = 1024;
/// Maximum number of blocks that normalise rows which have been summed.
const ROWS_BLOCKS: usize = 256;

/// Returns the number of blocks of the single kernel that runs `norm` among `n` ranks, and how many
/// of these blocks share a row. `norm` must have rows. `None` if the rows are too long or too many
/// for one kernel.
pub(super) fn one_shot(
    norm: &Norm,
    n: usize,
    layout: &ChannelLayout,
    tuning: &CudaThresholds,
) -> Option<(u32, u32)> {
    if n == 1 || norm.row_bytes() * norm.rows > tuning.one_shot_bytes {
        return None;
    }
    let most = tuning.blocks.min(tuning.ctas);
    let groups = norm.hidden / GROUP;
    // As many blocks as are available share a row. Each of them needs a group of the row, because
    // every block must receive from every peer.
    let shared = |&cluster: &usize| {
        let threads = threads(norm, cluster);
        cluster == 1 || (cluster * norm.rows <= most && (cluster - 1) * threads < groups)
    };
    let cluster =
        [8, 4, 2, 1].into_iter().filter(|&cluster| cluster <= tuning.cluster).find(shared)?;
    let (clusters, threads) = (norm.rows.min(most / cluster), threads(norm, cluster));
    let units_of_row =
        groups.div_ceil(cluster * threads) * threads * (norm.row_bytes() / groups / UNIT);
    let fits = norm.rows.div_ceil(clusters) * units_of_row <= layout.sentinel_units();
    fits.then_some(((clusters * cluster) as u32, cluster as u32))
}

/// Returns the number of blocks of the kernel that normalises `rows` rows which have been summed.
pub(super) fn rows_blocks(rows: usize, tuning: &CudaThresholds) -> u32 {
    rows.min(ROWS_BLOCKS).min(tuning.ctas) as u32
}

/// Returns the all-reduce of `call` that precedes the norm. Its output is where the normalised rows
/// go, or where the sums go if normalised rows are shorter.
pub fn reduction<'a>(call: &CallSpec<'a>) -> CallSpec<'a> {
    let same = Norm::of(call).is_none_or(|norm| norm.normed == Normed::Same);
    let to = call.outputs[usize::from(!same)];
    CallSpec {
        op: Collective::AllReduce,
        factor: 1.0,
        inputs: vec![call.inputs[0]].into(),
        outputs: vec![to].into(),
        ..call.clone()
    }
}

/// Returns the number of threads in each of `cluster` blocks that share a row of `norm`: one per
/// group, up to the number of accumulators.
pub(super) fn threads(norm: &Norm, cluster: usize) -> usize {
    (norm.hidden / GROUP).min(LANES).div_ceil(cluster).next_multiple_of(32).min(MOST_THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coll::all_reduce_norm::{MAX_HIDDEN, tests::call};
    use crate::coll::cuda::plan::tests::conditions;
    use crate::coll::cuda::plan::{Conditions, CudaPlan, choose};
    use crate::dtype::DType;

    #[test]
    fn rows_that_have_room_in_the_slots_take_one_kernel() {
        for n in [1, 2, 4, 8] {
            let conditions = conditions(n, CudaThresholds::of(n));
            let (layout, tuning) = (conditions.layout, conditions.tuning);
            for dtype in [DType::BF16, DType::F32] {
                for hidden in [8, 4096, 8192, MAX_HIDDEN] {
                    for rows in [0, 1, 3, 64, 65, 1000] {
                        let call = call(dtype, rows, hidden, 1e-6, Normed::Same);
                        let norm = Norm::of(&call).expect("a norm");
                        let plan = choose(&call, &conditions);
                        if let CudaPlan::NormOneShot { blocks, cluster } = plan {
                            let (blocks, cluster, groups) =
                                (blocks as usize, cluster as usize, hidden / GROUP);
                            let threads = threads(&norm, cluster);
                            let lanes = cluster * threads;
                            assert!(
                                groups <= lanes
                                    || lanes == LANES
                                    || (lanes == LANES / 2 && groups <= 2 * LANES),
                                "{norm:?}"
                            );
                            assert!(
                                threads.is_multiple_of(32) && (cluster - 1) * threads < groups,
                                "{norm:?}"
                            );
                            let clusters = blocks / cluster;
                            assert!(
                                n > 1
                                    && blocks <= tuning.blocks
                                    && (1..=rows).contains(&clusters)
                                    && blocks.is_multiple_of(cluster)
                            );
                            assert!(
                                rows.div_ceil(clusters) * norm.row_bytes()
                                    <= cluster * layout.sentinel_units() * UNIT
                            );
                        } else if let CudaPlan::NormRows { blocks } = plan {
                            assert!((1..=ROWS_BLOCKS.min(rows)).contains(&(blocks as usize)));
                        } else {
                            assert_eq!((plan, rows), (CudaPlan::Nothing, 0));
                        }
                    }
                }
            }
        }
        let conditions = conditions(2, CudaThresholds::of(2));
        let plan = |call: &CallSpec| choose(call, &conditions);
        let one_shot = |blocks, cluster| CudaPlan::NormOneShot { blocks, cluster };
        assert_eq!(plan(&call(DType::BF16, 1, 8192, 0.0, Normed::Same)), one_shot(8, 8));
        assert_eq!(plan(&call(DType::BF16, 1, 5120, 0.0, Normed::Same)), one_shot(4, 4));
        assert_eq!(plan(&call(DType::BF16, 17, 8192, 0.0, Normed::Same)), one_shot(68, 4));
        assert_eq!(plan(&call(DType::BF16, 64, 8192, 0.0, Normed::Dynamic)), one_shot(128, 2));
        assert_eq!(plan(&call(DType::BF16, 3, 8, 0.0, Normed::Same)), one_shot(3, 1));
        assert_eq!(
            plan(&call(DType::BF16, 65, 8192, 0.0, Normed::Same)),
            CudaPlan::NormRows { blocks: 65 }
        );
        let few = CudaThresholds { ctas: 8, ..CudaThresholds::of(2) };
        let limited = Conditions { tuning: &few, ..conditions };
        for (rows, expected) in [(8, one_shot(8, 1)), (64, CudaPlan::NormRows { blocks: 8 })] {
            assert_eq!(
                choose(&call(DType::BF16, rows, 8192, 0.0, Normed::Same), &limited),
                expected
            );
        }
        let mesh = Conditions { cube_mesh: true, ..conditions };
        assert!(matches!(
            choose(&call(DType::BF16, 1, 8192, 0.0, Normed::Same), &mesh),
            CudaPlan::NormRows { .. }
        ));
    }

    #[test]
    fn sums_go_where_the_norm_takes_them_from() {
        let at = |normed| {
            let mut call = call(DType::BF16, 2, 64, 0.0, normed);
            call.outputs.to_mut().iter_mut().enumerate().for_each(|(i, span)| span.addr = i + 1);
            let reduction = reduction(&call);
            (reduction.outputs[0].addr, reduction.outputs[0].bytes, reduction.outputs.len())
        };
        assert_eq!(
            [Normed::Same, Normed::Static, Normed::Dynamic].map(at),
            [(1, 256, 1), (2, 256, 1), (2, 256, 1)]
        );
    }
}
