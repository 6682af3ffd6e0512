// Two-shot all-reduce on sentinel slots: each rank adds up one piece of all inputs in rank order, and sends the sum to every peer.
// Each rank sends 2 (n - 1) / n S in two trips over the link, with no barrier between them.
#include "sentinel.cuh"

KERNEL(all_reduce_two_shot, AllReduceArgs) {
  after_predecessor();
  // step 1: find this block's part of the message, and each rank's piece of that
  const Common& common = args.common;
  const SentinelRound round = begin_round(common, args.sentinel);
  Wait wait;
  const u64 units = units_of(args.bytes);
  const u64 first = part_begin(units, block(), blocks());
  const u64 mine = part_begin(units, block() + 1, blocks()) - first;
  u64 start[WORLD];
  u32 count[WORLD];
  u32 longest = 0;
  for_each_rank([&](u32 r) {
    const u64 begins = part_begin(mine, r, WORLD);
    start[r] = (first + begins) * 16;
    count[r] = (u32)(part_begin(mine, r + 1, WORLD) - begins);
    longest = count[r] > longest ? count[r] : longest;
  });
  // step 2: push each peer its piece of this rank's input
  for (u32 i = thread(); i < longest; i += threads()) {
    Unit v[WORLD];
    for_each_peer([&](u32 r) {
      const u64 offset = start[r] + (u64)i * 16;
      if (i < count[r]) {
        v[r] = load_unit(args.from + offset, args.bytes - offset);
      }
    });
    for_each_peer([&](u32 r) {
      if (i < count[r]) {
        store_relaxed(sentinel_slot(common, round, r, 0, RANK, i), scrub(lift(v[r], args.factor)));
      }
    });
  }
  // step 3: add up this rank's piece in rank order, push the sum to every peer, store it here
  const u32 everybody = ((1u << WORLD) - 1) & ~(1u << RANK);
  for (u32 i = thread(); i < count[RANK]; i += threads()) {
    const u64 offset = start[RANK] + (u64)i * 16;
    Unit v[WORLD];
    v[RANK] = lift(load_unit(args.from + offset, args.bytes - offset), args.factor);
    pull_sentinel(common, round, 0, i, everybody, v, wait);
    const Unit sum = sum_in_order(v);
    for_each_peer([&](u32 r) { store_relaxed(sentinel_slot(common, round, r, 1, RANK, i), sum); });
    store_unit(args.to + offset, sum, args.bytes - offset);
  }
  allow_successor();
  // step 4: pull the sums of the other pieces and store them
  for (u32 i = thread(); i < longest; i += threads()) {
    u32 sources = 0;
    for_each_peer([&](u32 r) { sources |= i < count[r] ? 1u << r : 0; });
    Unit v[WORLD];
    pull_sentinel(common, round, 1, i, sources, v, wait);
    for_each_peer([&](u32 r) {
      if (i < count[r]) {
        const u64 offset = start[r] + (u64)i * 16;
        store_unit(args.to + offset, v[r], args.bytes - offset);
      }
    });
  }
  // step 5: end the epoch
  end_round(common, args.sentinel, round);
}
