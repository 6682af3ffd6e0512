// One-shot reductions of short messages on LL lines: every rank sends its message to each rank that needs the result, which adds up all
// messages in rank order.
#include "low_latency.cuh"
#include "types.cuh"

struct ReduceArgs {
  Common common;
  LowLatency ll;
  // Message of this rank to each rank; null: nothing but a flag.
  const u8* from[MAX_WORLD];
  u64 send[MAX_WORLD];
  // Result of this rank; null: it gets none.
  u8* to;
  u64 bytes;
  double factor;
};
static_assert(sizeof(ReduceArgs) == 464, "");

KERNEL(reduce_low_latency, ReduceArgs) {
  after_predecessor();
  // step 1: find this block's share of each message
  const Round round = begin_round(args.common, args.ll);
  Wait wait;
  u32 send[WORLD];
  u32 longest = 1;
  for_each_peer([&](u32 r) {
    send[r] = args.from[r] != nullptr ? share(round, args.ll, args.send[r]) : 0;
    longest = send[r] > longest ? send[r] : longest;
  });
  const u32 take = args.to != nullptr ? share(round, args.ll, args.bytes) : 0;
  // step 2: push each unit to the rank that needs it; at least one line goes to every peer
  for (u32 i = thread(); i < longest; i += threads()) {
    const u64 offset = (round.first + i) * 16;
    Unit v[WORLD];
    for_each_peer([&](u32 r) {
      v[r] = {0, 0, 0, 0};
      if (i < send[r]) {
        v[r] = lift(load_unit(args.from[r] + offset, args.send[r] - offset), args.factor);
      }
    });
    for_each_peer([&](u32 r) {
      if (i < at_least_one(send[r])) {
        push_unit(args.common, round, r, i, v[r]);
      }
    });
  }
  allow_successor();
  // step 3: pull each peer's unit, add up in rank order, store the sum
  // Every peer's first line is waited for, also without data: the two buffers of low_latency.cuh rely on it.
  const u32 everybody = ((1u << WORLD) - 1) & ~(1u << RANK);
  for (u32 i = thread(); i < at_least_one(take); i += threads()) {
    const u64 offset = (round.first + i) * 16;
    Unit v[WORLD];
    v[RANK] = {0, 0, 0, 0};
    if (i < take) {
      v[RANK] = lift(load_unit(args.from[RANK] + offset, args.bytes - offset), args.factor);
    }
    pull_units(args.common, round, i, everybody, v, wait);
    if (i < take) {
      Sum sum;
      begin(sum, v[0]);
#pragma unroll
      for (u32 r = 1; r < WORLD; ++r) {
        combine(sum, v[r]);
      }
      store_unit(args.to + offset, finish(sum), args.bytes - offset);
    }
  }
  // step 4: end the epoch
  end_round(args.common, args.ll, round);
}
