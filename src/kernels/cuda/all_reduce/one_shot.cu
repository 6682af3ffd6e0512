// One-shot all-reduce on sentinel slots: every rank sends its whole input to every peer and adds
// all inputs in rank order. For a tensor of S bytes each rank sends (n - 1) S bytes, in one trip
// over the link.
#include "sentinel.cuh"

KERNEL(all_reduce_one_shot, AllReduceArgs) {
  after_predecessor();
  // step 1: find this block's part of the message
  SentinelSession session(args.common, args.sentinel);
  session.begin();
  const u64 units = units_of(args.bytes);
  const u64 first = part_begin(units, block(), blocks());
  const u32 count = (u32)(part_begin(units, block() + 1, blocks()) - first);
  // step 2: send the part to every peer
  for (u32 i = thread(); i < count; i += threads()) {
    const u64 offset = (first + i) * 16;
    const Unit v = scrub(lift(load_unit(args.from + offset, args.bytes - offset), args.factor));
    for_each_peer([&](u32 r) { session.send(0, r, i, v); });
  }
  allow_successor();
  // step 3: receive each peer's unit, add the units in rank order, store the sum
  for (u32 i = thread(); i < count; i += threads()) {
    const u64 offset = (first + i) * 16;
    const Unit own = lift(load_unit(args.from + offset, args.bytes - offset), args.factor);
    const Unit sum = session.receive_reduce(0, i, own);
    store_unit(args.to + offset, sum, args.bytes - offset);
  }
  // step 4: end the epoch
  session.end();
}
