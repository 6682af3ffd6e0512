use super::*;

/// An H200 connected through NVSwitch.
const H200: DeviceModel =
    DeviceModel { processors: 132, flops_per_us: 6e6, link: 370.0, memory: 3500.0 };

fn bf16(rows: usize, columns: usize, depth: usize) -> MatmulShape {
    MatmulShape { rows, columns, depth, element: 2 }
}

/// The number of shards in each group of products.
fn groups(plan: &[ShardBatch]) -> Vec<usize> {
    let mut counts: Vec<(usize, usize)> = Vec::new();
    for ShardBatch { ranks, arrived } in plan {
        match counts.last_mut() {
            Some((last, count)) if last == arrived => *count += ranks.len(),
            _ => counts.push((*arrived, ranks.len())),
        }
    }
    counts.into_iter().map(|(_, count)| count).collect()
}

#[test]
fn products_take_the_time_that_was_measured() {
    // Microseconds on one H200 in a graph (2026-11-20), all rows at once.
    for (rows, columns, depth, measured) in [
        (4096, 1024, 8192, 87.0),
        (16384, 1024, 8192, 344.0),
        (8192, 3584, 8192, 592.0),
        (4096, 8192, 1024, 98.0),
        (8192, 8192, 3584, 631.0),
        (1024, 2048, 8192, 44.0),
        (4096, 2048, 8192, 169.0),
        (2048, 7168, 8192, 315.0),
    ] {
        let us = H200.product_us(rows, &bf16(rows, columns, depth));
        assert!(
            (0.85..1.15).contains(&(us / measured)),
            "{rows} {columns} {depth}: {us:.0} instead of {measured}"
        );
    }
}

#[test]
fn fewer_tiles_than_processors_still_take_a_while() {
    let (few, all) = (
        H200.product_us(512, &bf16(512, 1024, 8192)),
        H200.product_us(4096, &bf16(512, 1024, 8192)),
    );
    assert!(few > 15.0 && few < all / 3.0, "{few} of {all}");
}

#[test]
fn every_shard_is_multiplied_once_and_not_before_it_came() {
    for n in 2..=16 {
        for rank in 0..n {
            for rows in [1, 128, 512, 2048] {
                let plan = gather(n, rank, &bf16(rows, 1024, 8192), &H200).products;
                let mut seen = vec![false; n];
                let mut before = 0;
                for ShardBatch { ranks, arrived } in &plan {
                    assert!(*arrived >= before && *arrived < n, "{plan:?}");
                    before = *arrived;
                    for shard in ranks.clone() {
                        assert!(
                            !std::mem::replace(&mut seen[shard], true),
                            "{shard} twice: {plan:?}"
                        );
                        assert!(
                            (shard + n - rank) % n <= *arrived,
                            "{shard} of rank {rank} before it came: {plan:?}"
                        );
                    }
                }
                assert!(!seen[rank] && seen.iter().filter(|&&seen| !seen).count() == 1, "{plan:?}");
            }
        }
    }
}

#[test]
fn groups_of_the_shapes_that_are_measured() {
    // With few columns the link takes longer than all products. With many columns the products take
    // longer, and larger groups fill their waves.
    for (rows, columns, bound_by_link) in
        [(512, 1024, true), (2048, 1024, true), (1024, 3584, false)]
    {
        let GatherPlan { own_early, products: plan } =
            gather(8, 3, &bf16(rows, columns, 8192), &H200);
        assert!(own_early || !bound_by_link, "{plan:?}");
        let groups = groups(&plan);
        assert_eq!(groups.iter().sum::<usize>(), 7, "{plan:?}");
        assert!(groups.last() <= groups.iter().max(), "a large last group: {groups:?}");
        if bound_by_link {
            assert_eq!(groups.last(), Some(&1), "{groups:?}");
        } else {
            assert!(groups.len() < 7, "each shard for itself leaves processors idle: {groups:?}");
        }
    }
}

#[test]
fn the_own_rows_are_copied_while_the_link_is_waited_for() {
    let product = bf16(1024, 3584, 8192);
    assert!(gather(8, 3, &product, &DeviceModel { link: 100.0, ..H200 }).own_early);
    // Copying early was faster in a measurement.
    assert!(gather(4, 0, &bf16(1024, 2048, 8192), &H200).own_early);
    assert!(!gather(8, 3, &product, &DeviceModel { link: 1e9, ..H200 }).own_early);
}

#[test]
fn a_group_that_wraps_is_two_products() {
    // The link is so fast that smaller groups save nothing.
    let plan = gather(4, 2, &bf16(128, 256, 64), &DeviceModel { link: 1e9, ..H200 }).products;
    let of = |ranks, arrived| ShardBatch { ranks, arrived };
    let wrapped = plan.iter().all(|shards| shards.ranks.start == 3 || shards.ranks.end <= 2);
    assert!(wrapped, "{plan:?}");
    assert_eq!(gather(2, 1, &bf16(128, 256, 64), &H200).products, [of(0..1, 1)]);
}

#[test]
fn copies_are_for_parts_that_products_hide() {
    // With two ranks the only part from a peer is ready before this rank multiplies its own part,
    // which takes longer than the copy.
    assert_eq!(pulled(2, &bf16(2048, 8192, 4096), &H200), 1);
    // Eight ranks and long products: all parts but the last ones are copied while products run.
    let long = pulled(8, &bf16(1024, 8192, 3584), &H200);
    assert!(long >= 6, "{long}");
    // Short products: the link is the bottleneck, and the parts that remain at the end are loaded
    // once, by the sum.
    let short = pulled(8, &bf16(512, 8192, 1024), &H200);
    assert!((1..7).contains(&short), "{short}");
    assert!(pulled(8, &bf16(1, 8, 8), &H200) < 7);
}

#[test]
fn shards_and_parts_have_their_bytes() {
    let product = bf16(3, 5, 7);
    assert_eq!((product.shard_bytes(), product.part_bytes(4)), (Ok(42), Ok((256, 1024))));
    assert_eq!(bf16(128, 1, 1).part_bytes(2), Ok((256, 512)));
    let too_many = bf16(usize::MAX / 4, 3, 1).part_bytes(2).expect_err("no such memory");
    assert!(
        too_many
            .message
            .starts_with("no memory has 2 times 4611686018427387903 rows of 3 elements of 2 bytes"),
        "{too_many}"
    );
    assert!(
        bf16(usize::MAX / 2, 1, 1).part_bytes(1).is_err()
            && bf16(1 << 40, 1, 1 << 24).shard_bytes().is_err()
    );
}
