// Two-shot all-reduce on sentinel slots: each rank adds one piece of all inputs in rank order and
// sends the sum to every peer. For a tensor of S bytes each rank sends 2 (n - 1) / n S bytes, in
// two trips over the link with no barrier between them.
#include "sentinel.cuh"

KERNEL(all_reduce_two_shot, AllReduceArgs) {
  after_predecessor();
  // step 1: find this block's part of the message, and each rank's piece of that part
  SentinelSession session(args.common, args.sentinel);
  session.begin();
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
    longest = larger(count[r], longest);
  });
  // step 2: send each peer its piece of this rank's input
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
        session.send(0, r, i, scrub(lift(v[r], args.factor)));
      }
    });
  }
  // step 3: add this rank's piece in rank order, send the sum to every peer, store it here
  for (u32 i = thread(); i < count[RANK]; i += threads()) {
    const u64 offset = start[RANK] + (u64)i * 16;
    const Unit own = lift(load_unit(args.from + offset, args.bytes - offset), args.factor);
    const Unit sum = session.receive_reduce(0, i, own);
    for_each_peer([&](u32 r) { session.send(1, r, i, sum); });
    store_unit(args.to + offset, sum, args.bytes - offset);
  }
  allow_successor();
  // step 4: receive the sums of the other pieces and store them
  for (u32 i = thread(); i < longest; i += threads()) {
    u32 sources = 0;
    for_each_peer([&](u32 r) { sources |= i < count[r] ? 1u << r : 0; });
    Unit v[WORLD];
    session.receive(1, i, sources, v);
    for_each_peer([&](u32 r) {
      if (i < count[r]) {
        const u64 offset = start[r] + (u64)i * 16;
        store_unit(args.to + offset, v[r], args.bytes - offset);
      }
    });
  }
  // step 5: end the epoch
  session.end();
}
