// One-shot reductions of short messages on LL lines: every rank sends its message to each rank that
// needs the result, and that rank adds all messages in rank order.
#include "low_latency.cuh"
#include "reduction.cuh"

struct ReduceArgs {
  Common common;
  LowLatency ll;
  // Message of this rank to each rank; null: only a flag.
  const u8* from[MAX_WORLD];
  u64 send[MAX_WORLD];
  // Result of this rank; null if it gets none.
  u8* to;
  u64 bytes;
  double factor;
};
static_assert(sizeof(ReduceArgs) == 464, "");

KERNEL(reduce_low_latency, ReduceArgs) {
  after_predecessor();
  // step 1: find this block's share of each message
  LowLatencySession session(args.common, args.ll);
  session.begin();
  u32 send[WORLD];
  u32 longest = 1;
  for_each_peer([&](u32 r) {
    send[r] = args.from[r] != nullptr ? session.share(args.send[r]) : 0;
    longest = larger(send[r], longest);
  });
  const u32 take = args.to != nullptr ? session.share(args.bytes) : 0;
  // step 2: send each unit to the rank that needs it
  session.send_each(send, longest, [&](u32 r, u64 offset) {
    return lift(load_unit(args.from[r] + offset, args.send[r] - offset), args.factor);
  });
  allow_successor();
  // step 3: receive each peer's unit, add the units in rank order, store the sum. The block waits
  // for every peer's first line even without data: the two buffers of low_latency.cuh rely on it.
  for (u32 i = thread(); i < at_least_one(take); i += threads()) {
    const u64 offset = (session.first + i) * 16;
    Unit own = {0, 0, 0, 0};
    if (i < take) {
      own = lift(load_unit(args.from[RANK] + offset, args.bytes - offset), args.factor);
    }
    const Unit sum = session.receive_reduce(i, own, sum_in_order);
    if (i < take) {
      store_unit(args.to + offset, sum, args.bytes - offset);
    }
  }
  // step 4: end the epoch
  session.end();
}
