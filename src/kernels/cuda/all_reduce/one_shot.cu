// One-shot all-reduce on sentinel slots: every rank sends its whole input to every peer, and adds up all inputs in rank order.
// Each rank sends (n - 1) S in one trip over the link.
#include "sentinel.cuh"

KERNEL(all_reduce_one_shot, AllReduceArgs) {
  after_predecessor();
  // step 1: find this block's part of the message
  const Common& common = args.common;
  const SentinelRound round = begin_round(common, args.sentinel);
  Wait wait;
  const u64 units = units_of(args.bytes);
  const u64 first = part_begin(units, block(), blocks());
  const u32 count = (u32)(part_begin(units, block() + 1, blocks()) - first);
  // step 2: push the part to every peer
  for (u32 i = thread(); i < count; i += threads()) {
    const u64 offset = (first + i) * 16;
    const Unit v = scrub(lift(load_unit(args.from + offset, args.bytes - offset), args.factor));
    for_each_peer([&](u32 r) { store_relaxed(sentinel_slot(common, round, r, 0, RANK, i), v); });
  }
  allow_successor();
  const u32 everybody = ((1u << WORLD) - 1) & ~(1u << RANK);
  // step 3: pull each peer's unit, add up in rank order, store the sum
  for (u32 i = thread(); i < count; i += threads()) {
    const u64 offset = (first + i) * 16;
    Unit v[WORLD];
    v[RANK] = lift(load_unit(args.from + offset, args.bytes - offset), args.factor);
    pull_sentinel(common, round, 0, i, everybody, v, wait);
    store_unit(args.to + offset, sum_in_order(v), args.bytes - offset);
  }
  // step 4: end the epoch
  end_round(common, args.sentinel, round);
}
