// Every collective that moves bytes unchanged, and sends and receives: each rank has a message for each.
//
// Between two ranks a short message travels low-latency, a long one staged; only the two know its length. How many blocks serve which
// protocol is the same on all ranks, so that every block finds its counterpart. Barrier: the low-latency protocol without data.
#include "low_latency.cuh"
#include "pieces.cuh"

struct ExchangeArgs {
  Common common;
  LowLatency ll;
  Staging staging;
  // Blocks of the low-latency protocol; 0: nobody uses it in this call. Staging has 3 blocks a lane: senders, receivers, and those who
  // copy what a rank keeps.
  u32 ll_blocks;
  // Longer messages are staged.
  u64 short_bytes;
  Outgoing out;
  u8* to[MAX_WORLD];
  u64 bytes[MAX_WORLD];
};
static_assert(sizeof(ExchangeArgs) == 752, "");

// The message of a rank to itself, if it is not where it belongs already.
DEVICE void keep_own(const ExchangeArgs& args, u32 part, u32 parts) {
  if (args.out.from[RANK] != nullptr && args.to[RANK] != nullptr) {
    copy_own(args.out.from[RANK], args.to[RANK], args.out.bytes[RANK], part, parts);
  }
}

DEVICE void exchange_short(const ExchangeArgs& args) {
  const Round round = begin_round(args.common, args.ll);
  Wait wait;
  u32 send[WORLD], take[WORLD];
  u32 longest = 1;
#pragma unroll
  for (u32 k = 1; k < WORLD; ++k) {
    const u32 r = (RANK + k) % WORLD;
    send[r] = args.out.bytes[r] <= args.short_bytes ? share(round, args.ll, args.out.bytes[r]) : 0;
    take[r] = args.bytes[r] <= args.short_bytes ? share(round, args.ll, args.bytes[r]) : 0;
    longest = send[r] > longest ? send[r] : longest;
    longest = take[r] > longest ? take[r] : longest;
  }
  for (u32 i = thread(); i < longest; i += threads()) {
    const u64 offset = (round.first + i) * 16;
    Unit v[WORLD];
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
      const u32 r = (RANK + k) % WORLD;
      v[r] = {0, 0, 0, 0};
      if (i < send[r]) {
        v[r] = load_unit(args.out.from[r] + offset, args.out.bytes[r] - offset);
      }
    }
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
      const u32 r = (RANK + k) % WORLD;
      if (i < at_least_one(send[r])) {
        push_unit(args.common, round, r, i, v[r]);
      }
    }
  }
  allow_successor();
  if (args.staging.lanes == 0) {
    keep_own(args, block(), blocks());
  }
  for (u32 i = thread(); i < longest; i += threads()) {
    const u64 offset = (round.first + i) * 16;
    u32 sources = 0;
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
      const u32 r = (RANK + k) % WORLD;
      sources |= i < at_least_one(take[r]) ? 1u << r : 0;
    }
    Unit v[WORLD];
    pull_units(args.common, round, i, sources, v, wait);
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
      const u32 r = (RANK + k) % WORLD;
      if (i < take[r]) {
        store_unit(args.to[r] + offset, v[r], args.bytes[r] - offset);
      }
    }
  }
  end_round(args.common, args.ll, round);
}

KERNEL(exchange, ExchangeArgs) {
  after_predecessor();
  const u32 lanes = args.staging.lanes;
  u32 to = 0, from = 0;
#pragma unroll
  for (u32 k = 1; k < WORLD; ++k) {
    const u32 r = (RANK + k) % WORLD;
    to |= args.ll_blocks == 0 || args.out.bytes[r] > args.short_bytes ? 1u << r : 0;
    from |= args.ll_blocks == 0 || args.bytes[r] > args.short_bytes ? 1u << r : 0;
  }
  const auto [lane, role] = place_of(block(), 3);
  if (lane >= lanes) {
    // A block of the low-latency protocol alone.
  } else if (role == 0) {
    Stage stage(args.common, args.staging, lane);
    send_pieces(stage, args.out, to, [](Unit v) { return v; });
  } else if (role == 1) {
    Stage stage(args.common, args.staging, lane);
    take_pieces(stage, args.bytes, from, CopyOut{args.to, args.bytes});
  } else {
    keep_own(args, lane, lanes);
  }
  if (block() < args.ll_blocks) {
    exchange_short(args);
  }
}
