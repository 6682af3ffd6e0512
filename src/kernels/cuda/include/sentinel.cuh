// Floats that are their own flags: a slot holds words of all ones, which are NaNs that senders never send, until data overwrite them.
// As fast as the link: nothing travels but data, no fence. The reader marks the slot empty again once it has read it.
//
// Two buffers, by the parity of the block's epoch, for the reason that stands in low_latency.cuh: in every call every block must hear
// from the same block of every peer, so each block needs a unit of every rank's piece.
#pragma once
#include "bytes.cuh"
#include "types.cuh"
#include "wait.cuh"

static_assert(EMPTY_IS_NAN, "a word of all ones is data for this element type");

struct Sentinel {
  // Offsets in the channel: the blocks' epochs, then [block][parity][stage][source][unit].
  u64 epochs;
  u64 slots;
  // Units of one source in one stage of one block.
  u32 units;
};

struct SentinelRound {
  u32 epoch;
  u64 base;
  u64 stride;
};

DEVICE SentinelRound begin_round(const Common& common, const Sentinel& sentinel) {
  SentinelRound round;
  round.epoch = ((const u32*)(common.peer[RANK] + sentinel.epochs))[block()] + 1;
  round.stride = (u64)sentinel.units * 16;
  round.base = sentinel.slots + (u64)(block() * 2 + (round.epoch & 1)) * 2 * WORLD * round.stride;
  return round;
}

DEVICE void end_round(const Common& common, const Sentinel& sentinel, const SentinelRound& round) {
  sync_block();
  if (thread() == 0) {
    ((u32*)(common.peer[RANK] + sentinel.epochs))[block()] = round.epoch;
  }
}

DEVICE Unit* sentinel_slot(const Common& common, const SentinelRound& round, u32 at, u32 stage, u32 from, u32 unit) {
  return (Unit*)(common.peer[at] + round.base + (stage * WORLD + from) * round.stride) + unit;
}

DEVICE bool is_empty(Unit v) {
  return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u;
}

// Waits for `unit` of every rank in `sources` (a bit each) and marks their slots empty.
DEVICE void pull_sentinel(
    const Common& common,
    const SentinelRound& round,
    u32 stage,
    u32 unit,
    u32 sources,
    Unit (&v)[WORLD],
    Wait& wait) {
  u32 missing;
  bool waiting;
  do {
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
      const u32 r = (RANK + k) % WORLD;
      v[r] = load_relaxed(sentinel_slot(common, round, RANK, stage, r, unit));
    }
    missing = 0;
    waiting = false;
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
      const u32 r = (RANK + k) % WORLD;
      const bool lacking = is_empty(v[r]) && (sources >> r & 1);
      missing |= lacking ? 1u << r : 0;
      waiting |= lacking;
    }
    // Not `missing != 0`: see pull_units.
  } while (waiting && keep_waiting(wait, common, missing));
#pragma unroll
  for (u32 k = 1; k < WORLD; ++k) {
    const u32 r = (RANK + k) % WORLD;
    if (sources >> r & 1) {
      store_relaxed(sentinel_slot(common, round, RANK, stage, r, unit), {~0u, ~0u, ~0u, ~0u});
    }
  }
}

// Where part `part` of `parts` begins; the parts differ by one unit at most.
DEVICE u64 part_begin(u64 units, u32 part, u32 parts) {
  return units * part / parts;
}

struct AllReduceArgs {
  Common common;
  Sentinel sentinel;
  const u8* from;
  u8* to;
  u64 bytes;
  double factor;
};
static_assert(sizeof(AllReduceArgs) == 216, "");

DEVICE Unit sum_in_order(const Unit (&v)[WORLD]) {
  Sum sum;
  begin(sum, v[0]);
#pragma unroll
  for (u32 r = 1; r < WORLD; ++r) {
    combine(sum, v[r]);
  }
  return scrub(finish(sum));
}
