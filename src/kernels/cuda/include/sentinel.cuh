// Sentinel slots (TensorRT-LLM's Lamport buffers): floats that are their own flags.
// A slot holds words of all ones, which are NaNs that senders never send, until data overwrite them. The reader marks the slot empty again
// once it has read it. Nothing travels but data, without a fence, so a message is as fast as the link.
//
// Two buffers, by the parity of the block's epoch, suffice for the reason that low_latency.cuh gives: in every call every block must
// receive from the same block of every peer, so each block needs a unit of every rank's piece.
#pragma once
#include "bytes.cuh"
#include "types.cuh"
#include "wait.cuh"

static_assert(EMPTY_IS_NAN, "a word of all ones is data for this element type");

// Place of the sentinel slots in a channel.
struct Sentinel {
  // Offsets in the channel of the blocks' epochs, and of the slots: [block][parity][stage][source][unit].
  u64 epochs;
  u64 slots;
  // Units that one source has in one stage of one block.
  u32 units;
};

// One block's epoch on the sentinel slots, and where its slots lie.
struct SentinelRound {
  u32 epoch;
  u64 base;
  u64 stride;
};

// Begins the block's round of a call: the epoch after that of its last call.
DEVICE SentinelRound begin_round(const Common& common, const Sentinel& sentinel) {
  SentinelRound round;
  round.epoch = ((const u32*)(common.peer[RANK] + sentinel.epochs))[block()] + 1;
  round.stride = (u64)sentinel.units * 16;
  round.base = sentinel.slots + (u64)(block() * 2 + (round.epoch & 1)) * 2 * WORLD * round.stride;
  return round;
}

// Saves the block's epoch for its next call, once all threads of the block are done with the round.
DEVICE void end_round(const Common& common, const Sentinel& sentinel, const SentinelRound& round) {
  sync_block();
  if (thread() == 0) {
    ((u32*)(common.peer[RANK] + sentinel.epochs))[block()] = round.epoch;
  }
}

// Slot on rank `at` of the unit that rank `from` sends it in `stage`.
DEVICE Unit* sentinel_slot(const Common& common, const SentinelRound& round, u32 at, u32 stage, u32 from, u32 unit) {
  return (Unit*)(common.peer[at] + round.base + (stage * WORLD + from) * round.stride) + unit;
}

// Says whether a word of the unit has not arrived.
DEVICE bool is_empty(Unit v) {
  return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u;
}

// Waits for `unit` of every rank in `sources` (a bit each), loads it into `v` and marks its slot empty.
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
  // step 1: load the slots of all sources until none is empty
  do {
    for_each_peer([&](u32 r) { v[r] = load_relaxed(sentinel_slot(common, round, RANK, stage, r, unit)); });
    missing = 0;
    waiting = false;
    for_each_peer([&](u32 r) {
      const bool lacking = is_empty(v[r]) && (sources >> r & 1);
      missing |= lacking ? 1u << r : 0;
      waiting |= lacking;
    });
    // Not `missing != 0`, for the assembler's fault that pull_units (low_latency.cuh) names.
  } while (waiting && keep_waiting(wait, common, missing));
  // step 2: mark the slots empty for the round after the next
  for_each_peer([&](u32 r) {
    if (sources >> r & 1) {
      store_relaxed(sentinel_slot(common, round, RANK, stage, r, unit), {~0u, ~0u, ~0u, ~0u});
    }
  });
}

// First unit of part `part` of `parts`; the parts differ by one unit at most.
DEVICE u64 part_begin(u64 units, u32 part, u32 parts) {
  return units * part / parts;
}

// Arguments of the one-shot and the two-shot all-reduce; `factor` is the factor of PREMUL_SUM.
struct AllReduceArgs {
  Common common;
  Sentinel sentinel;
  const u8* from;
  u8* to;
  u64 bytes;
  double factor;
};
static_assert(sizeof(AllReduceArgs) == 216, "");

// Sum of one unit of each rank, in rank order, without words of all ones.
DEVICE Unit sum_in_order(const Unit (&v)[WORLD]) {
  Sum sum;
  begin(sum, v[0]);
#pragma unroll
  for (u32 r = 1; r < WORLD; ++r) {
    combine(sum, v[r]);
  }
  return scrub(finish(sum));
}
