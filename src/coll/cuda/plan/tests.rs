use super::*;
use crate::coll::call::Span;

fn call(op: Collective, dtype: DType, bytes: usize) -> CallSpec<'static> {
    // More spans than an all-to-all needs do no harm.
    let spans = vec![Span { addr: 0, bytes }; if op == Collective::AllToAll { 16 } else { 1 }];
    let (inputs, outputs) = (spans.clone().into(), spans.into());
    CallSpec { op, dtype, inputs, outputs, ..CallSpec::barrier(None) }
}

/// Makes the conditions of rank 0 of `n` ranks, without a cube mesh and without zero-copy.
pub(crate) fn conditions(n: usize, tuning: CudaThresholds) -> Conditions<'static> {
    let layout = Box::leak(Box::new(ChannelLayout::new(n, 512 << 20).expect("fits")));
    let tuning = Box::leak(Box::new(tuning));
    Conditions { me: 0, n, layout, tuning, cube_mesh: false, zero_copy: false }
}

#[test]
fn every_plan_fits_its_memory() {
    for n in 2..=16 {
        let layout = ChannelLayout::new(n, 256 << 20).expect("fits");
        let conditions = conditions(n, CudaThresholds::of(n));
        let conditions = Conditions { layout: &layout, cube_mesh: n == 8, ..conditions };
        for op in Collective::C10D {
            for shift in 0..33 {
                for bytes in [1usize << shift, (1 << shift) + 1, (1 << shift) * 3 / 2] {
                    let units = bytes.div_ceil(UNIT);
                    match choose(&call(*op, DType::BF16, bytes), &conditions) {
                        CudaPlan::Nothing => panic!("{op:?} of {bytes} bytes"),
                        CudaPlan::Exchange { ll_blocks, lanes } => {
                            assert!(
                                ll_blocks as usize <= layout.ll_blocks()
                                    && lanes as usize <= layout.lanes()
                            );
                            assert!(lanes > 0 || units <= ll_blocks as usize * LL_UNITS);
                        }
                        CudaPlan::ReduceLowLatency { blocks } => {
                            assert!(
                                units <= blocks as usize * LL_UNITS
                                    && blocks as usize <= layout.ll_blocks()
                            )
                        }
                        CudaPlan::OneShot { blocks } => {
                            assert!(
                                units.div_ceil(blocks as usize) <= layout.sentinel_units()
                                    && units >= blocks as usize
                            );
                        }
                        CudaPlan::TwoShot { blocks } => {
                            let block = units.div_ceil(blocks as usize);
                            assert!(
                                block.div_ceil(n) <= layout.sentinel_units()
                                    && units / blocks as usize >= n,
                                "{n} {bytes}"
                            );
                        }
                        CudaPlan::CubeMesh { blocks } => {
                            assert!(
                                n == 8 && *op == Collective::AllReduce && bytes <= CUBE_MESH_BYTES
                            );
                            assert!(
                                (1..=layout.ll_blocks()).contains(&(blocks as usize))
                                    && units > (blocks as usize - 1) * LL_UNITS
                            );
                        }
                        CudaPlan::NormOneShot { .. } | CudaPlan::NormRows { .. } => {
                            panic!("{op:?} norms nothing")
                        }
                        CudaPlan::ReduceStaged { lanes, chunk }
                        | CudaPlan::RsagStaged { lanes, chunk } => {
                            assert!(
                                (1..=layout.lanes()).contains(&(lanes as usize))
                                    && chunk as usize <= layout.slot_bytes()
                                    && chunk >= 512
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn no_kernel_has_more_blocks_than_the_options_allow() {
    for (n, ctas) in [2, 3, 8].into_iter().flat_map(|n| [1, 16, 32].map(|ctas| (n, ctas))) {
        let usual = conditions(n, CudaThresholds { ctas, ..CudaThresholds::of(n) });
        let plans = |zero_copy| {
            let conditions = Conditions { zero_copy, ..usual };
            let sizes = (0..33).map(|shift| 3usize << shift);
            let of = move |bytes| {
                [DType::BF16, DType::I32]
                    .map(|dtype| Collective::C10D.iter().map(move |op| call(*op, dtype, bytes)))
            };
            sizes.flat_map(of).flatten().map(|call| choose(&call, &conditions)).collect::<Vec<_>>()
        };
        for plan in plans(false).into_iter().chain(plans(true)) {
            let (blocks, roles) = match plan {
                CudaPlan::Exchange { ll_blocks, lanes } => (ll_blocks.max(2 * lanes), 2),
                CudaPlan::ReduceStaged { lanes, .. } => (2 * lanes, 2),
                CudaPlan::RsagStaged { lanes, .. } => (3 * lanes, 3),
                CudaPlan::ReduceLowLatency { blocks }
                | CudaPlan::OneShot { blocks }
                | CudaPlan::TwoShot { blocks } => (blocks, 1),
                CudaPlan::Nothing
                | CudaPlan::CubeMesh { .. }
                | CudaPlan::NormOneShot { .. }
                | CudaPlan::NormRows { .. } => (1, 1),
            };
            assert!(blocks as usize <= ctas.max(roles), "{plan:?} of {n} ranks with {ctas} blocks");
        }
    }
}

#[test]
fn the_size_and_the_type_decide() {
    let conditions = conditions(8, CudaThresholds::of(8));
    let plan = |op, dtype, bytes| choose(&call(op, dtype, bytes), &conditions);
    assert_eq!(plan(Collective::AllReduce, DType::BF16, 1024), CudaPlan::OneShot { blocks: 1 });
    assert_eq!(
        plan(Collective::AllReduce, DType::I32, 1024),
        CudaPlan::ReduceLowLatency { blocks: 1 }
    );
    assert!(matches!(plan(Collective::AllReduce, DType::BF16, 1 << 20), CudaPlan::TwoShot { .. }));
    assert!(matches!(
        plan(Collective::AllReduce, DType::BF16, 16 << 20),
        CudaPlan::RsagStaged { .. }
    ));
    assert_eq!(plan(Collective::AllReduce, DType::F32, 0), CudaPlan::Nothing);
    assert!(
        matches!(plan(Collective::AllToAll, DType::F32, 0), CudaPlan::Exchange { .. }),
        "others may have data"
    );
}

#[test]
fn no_processor_has_a_block_more_than_the_others() {
    for (n, processors, zero_copy) in
        [(2, 132, false), (2, 132, true), (2, 108, false), (3, 132, false), (4, 132, false)]
    {
        let tuning = CudaThresholds { lanes: processors, ..CudaThresholds::of(n) };
        let conditions = Conditions { zero_copy, ..conditions(n, tuning) };
        for op in [
            Collective::Broadcast,
            Collective::AllGather,
            Collective::AllToAll,
            Collective::AllReduce,
            Collective::ReduceScatter,
        ] {
            let blocks = match choose(&call(op, DType::BF16, 256 << 20), &conditions) {
                CudaPlan::Exchange { lanes, .. } => 2 * lanes,
                CudaPlan::ReduceStaged { .. } if zero_copy => continue,
                CudaPlan::ReduceStaged { lanes, .. } => 2 * lanes,
                CudaPlan::RsagStaged { lanes, .. } => 3 * lanes,
                CudaPlan::Nothing
                | CudaPlan::ReduceLowLatency { .. }
                | CudaPlan::OneShot { .. }
                | CudaPlan::TwoShot { .. }
                | CudaPlan::CubeMesh { .. }
                | CudaPlan::NormOneShot { .. }
                | CudaPlan::NormRows { .. } => panic!("{op:?} is long and no norm"),
            };
            assert!(
                blocks.is_multiple_of(processors as u32),
                "{op:?} of {n}: {blocks} blocks on {processors} processors"
            );
        }
    }
}

#[test]
fn a_broadcast_to_a_single_other_rank_is_one_message() {
    for (n, long) in [(2, "exchange_staged"), (3, "rsag_staged")] {
        let conditions = conditions(n, CudaThresholds::of(n));
        let name =
            |bytes| choose(&call(Collective::Broadcast, DType::BF16, bytes), &conditions).name();
        assert_eq!((name(1 << 10), name(64 << 20)), ("exchange_low_latency", long), "{n} ranks");
    }
}

#[test]
fn short_all_reduces_of_a_cube_mesh_keep_to_its_edges() {
    let without = conditions(8, CudaThresholds::of(8));
    let with = Conditions { cube_mesh: true, ..without };
    let plan = |op, dtype, bytes| choose(&call(op, dtype, bytes), &with);
    for dtype in [DType::BF16, DType::F64, DType::I8, DType::F8E4M3FN] {
        assert_eq!(plan(Collective::AllReduce, dtype, 8), CudaPlan::CubeMesh { blocks: 1 });
        assert_eq!(plan(Collective::AllReduce, dtype, 4096), CudaPlan::CubeMesh { blocks: 1 });
        assert_eq!(plan(Collective::AllReduce, dtype, 4097), CudaPlan::CubeMesh { blocks: 2 });
        assert_eq!(plan(Collective::AllReduce, dtype, CUBE_MESH_BYTES).name(), "cube_mesh");
        assert_eq!(plan(Collective::AllReduce, dtype, 0), CudaPlan::Nothing);
        let long = call(Collective::AllReduce, dtype, CUBE_MESH_BYTES + 1);
        assert_eq!(choose(&long, &with), choose(&long, &without));
    }
    for op in Collective::C10D.iter().filter(|op| **op != Collective::AllReduce) {
        let call = call(*op, DType::F32, 4096);
        assert_eq!(choose(&call, &with), choose(&call, &without), "{op:?}");
    }
}

#[test]
fn long_messages_alone_are_zero_copy() {
    let tuning = CudaThresholds { zero_copy_two_shot_bytes: 1 << 20, ..CudaThresholds::of(8) };
    let without = conditions(8, tuning);
    let with = Conditions { zero_copy: true, ..without };
    for (op, bytes, name) in [
        (Collective::AllGather, 1 << 10, "exchange_low_latency"),
        (Collective::AllGather, 1 << 20, "exchange_staged_zero_copy"),
        (Collective::AllToAll, 1 << 10, "exchange_mixed_zero_copy"),
        (Collective::Broadcast, 1 << 20, "rsag_staged_zero_copy"),
        (Collective::ReduceScatter, 1 << 10, "reduce_low_latency"),
        (Collective::ReduceScatter, 1 << 20, "reduce_staged_zero_copy"),
        (Collective::AllReduce, 1 << 20, "two_shot"),
        (Collective::AllReduce, 2 << 20, "rsag_staged_zero_copy"),
    ] {
        let plan = choose(&call(op, DType::BF16, bytes), &with);
        assert_eq!(plan.served_as(true), name);
        assert_eq!(plan.has_lanes(), name.ends_with("_zero_copy"), "{op:?} {bytes}");
        assert_eq!(plan.served_as(false), plan.name());
    }
    assert!(matches!(
        choose(&call(Collective::AllReduce, DType::BF16, 2 << 20), &without),
        CudaPlan::TwoShot { .. }
    ));
    let worth = |op, bytes, n| {
        worth_zero_copy(
            &call(op, DType::BF16, bytes),
            0,
            n,
            &CudaThresholds { zero_copy_bytes: 1 << 20, ..tuning },
        )
    };
    for (op, n, least) in [
        (Collective::AllGather, 2, 1 << 20),
        (Collective::ReduceScatter, 8, 1 << 20),
        (Collective::AllReduce, 4, 4 << 20),
        (Collective::Broadcast, 4, 3 << 20),
        (Collective::Broadcast, 2, 1 << 20),
        (Collective::AllToAll, 2, 1 << 20),
        (Collective::AllToAll, 3, 0),
    ] {
        assert!(worth(op, least, n) && (least == 0 || !worth(op, least - 2, n)), "{op:?}");
    }
    assert!(
        worth(Collective::ReduceScatter, (4 << 20) - 1, 8)
            && !worth(Collective::ReduceScatter, 4 << 20, 8),
        "pushed faster than loaded"
    );
    assert!(
        ![Collective::Broadcast, Collective::AllToAll, Collective::AllGather]
            .iter()
            .any(|op| worth(*op, 1 << 30, 1)),
        "there is nobody to share with"
    );
    // The blocks of one kernel must have their words in the handshake's area.
    assert!(
        UNKNOWN_LL_BLOCKS as usize
            <= ChannelLayout::new(16, 256 << 20).expect("fits").handshake_blocks()
    );
}
