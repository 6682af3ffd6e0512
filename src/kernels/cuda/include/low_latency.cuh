// LL lines (NCCL's LL protocol): short messages whose data carry their own flags, in one trip over the link and without a fence.
// Half of what travels is flags, so long messages travel otherwise.
//
// A unit travels as two lines of two halves. Each half is 4 bytes of data and 4 of flag, which arrive together: the flag says that the data
// are there. The flag is the block's epoch, which the kernel itself counts in device memory: a replayed graph goes on where the last call
// ended, and nothing is ever cleared.
//
// Two buffers, by the epoch's parity, suffice because a block that ends an epoch knows that the same block of every peer has begun it:
// it has received from each, or (all_reduce/cube_mesh.cu) from a rank that had. So a block that writes into the buffer of epoch e + 2 has
// ended e + 1, which every peer began after it had read all of e.
#pragma once
#include "bytes.cuh"
#include "wait.cuh"

// Place of the LL lines in a channel.
struct LowLatency {
  // Offsets in the channel of the blocks' epochs, and of the lines: [block][parity][source][unit], two lines each.
  u64 epochs;
  u64 lines;
  // Units of one message that one block carries in a round, and that have space in its buffer.
  u32 units;
};

// One block's epoch on the LL lines, and what it carries in it.
struct Round {
  u32 epoch;
  // Offset of this block's lines, and the bytes of them that each source has.
  u64 base;
  u64 stride;
  // First unit of every message that this block carries.
  u64 first;
};

// Round whose epoch follows `last`.
DEVICE Round round_after(const LowLatency& ll, u32 last, u64 first) {
  Round round;
  // Epoch 0 is left out: memory begins with it. 2 follows, not 1, since parities alternate.
  round.epoch = last + 1 == 0 ? 2 : last + 1;
  round.stride = (u64)ll.units * 32;
  round.base = ll.lines + (u64)(block() * 2 + (round.epoch & 1)) * WORLD * round.stride;
  round.first = first;
  return round;
}

// Begins the block's first round of a call: the epoch after that of its last call.
DEVICE Round begin_round(const Common& common, const LowLatency& ll) {
  return round_after(ll, ((const u32*)(common.peer[RANK] + ll.epochs))[block()], (u64)block() * ll.units);
}

// Begins another round of the same call, for what all blocks together could not carry in this one.
DEVICE Round next_round(const LowLatency& ll, const Round& round) {
  sync_block();
  return round_after(ll, round.epoch, round.first + (u64)blocks() * ll.units);
}

// Saves the block's epoch for its next call, once all threads of the block are done with the round.
DEVICE void end_round(const Common& common, const LowLatency& ll, const Round& round) {
  sync_block();
  if (thread() == 0) {
    ((u32*)(common.peer[RANK] + ll.epochs))[block()] = round.epoch;
  }
}

// Units of a message of `bytes` that this block carries in the round.
DEVICE u32 share(const Round& round, const LowLatency& ll, u64 bytes) {
  const u64 units = units_of(bytes);
  return units <= round.first ? 0 : (u32)smaller(units - round.first, ll.units);
}

// Units that are sent for `units` of data: at least one goes to every peer, with or without data.
DEVICE u32 at_least_one(u32 units) {
  return units == 0 ? 1 : units;
}

// Stores a unit, with the round's flag, in the lines of rank `to`.
DEVICE void push_unit(const Common& common, const Round& round, u32 to, u32 unit, Unit v) {
  Line* line = (Line*)(common.peer[to] + round.base + RANK * round.stride + (u64)unit * 32);
  const u64 flag = (u64)round.epoch << 32;
  store_relaxed(line, {flag | v.x, flag | v.y});
  store_relaxed(line + 1, {flag | v.z, flag | v.w});
}

// Waits for `unit` of every rank in `sources` (a bit each) and loads it into `v`; each turn looks at all of them.
DEVICE void pull_units(const Common& common, const Round& round, u32 unit, u32 sources, Unit (&v)[WORLD], Wait& wait) {
  const u8* own = common.peer[RANK] + round.base + (u64)unit * 32;
  const u32 epoch = round.epoch;
  u32 missing;
  bool waiting;
  do {
    Line a[WORLD], b[WORLD];
    for_each_peer([&](u32 r) {
      const Line* line = (const Line*)(own + r * round.stride);
      a[r] = load_relaxed(line);
      b[r] = load_relaxed(line + 1);
    });
    missing = 0;
    waiting = false;
    for_each_peer([&](u32 r) {
      const bool first = (u32)(a[r].first >> 32) == epoch && (u32)(a[r].second >> 32) == epoch;
      const bool second = (u32)(b[r].first >> 32) == epoch && (u32)(b[r].second >> 32) == epoch;
      const bool lacking = !(first && second) && (sources >> r & 1);
      missing |= lacking ? 1u << r : 0;
      waiting |= lacking;
      v[r] = {(u32)a[r].first, (u32)a[r].second, (u32)b[r].first, (u32)b[r].second};
    });
    // Not `missing != 0`: for 3 ranks the assembler of CUDA 13.0 turns "no bit is set" into "not both are".
  } while (waiting && keep_waiting(wait, common, missing));
}

// Rank to receive from, and the ranks (a bit each) to name if nothing comes.
struct Source {
  u32 rank;
  u32 names;
};

// Waits for `unit` of the ranks `from`, which are known only when the kernel runs; each turn looks at all of them.
template <u32 COUNT>
DEVICE void pull_from(const Common& common, const Round& round, u32 unit, const Source (&from)[COUNT], Unit (&v)[COUNT], Wait& wait) {
  const u8* own = common.peer[RANK] + round.base + (u64)unit * 32;
  const u32 epoch = round.epoch;
  u32 missing;
  do {
    Line a[COUNT], b[COUNT];
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
      const Line* line = (const Line*)(own + from[k].rank * round.stride);
      a[k] = load_relaxed(line);
      b[k] = load_relaxed(line + 1);
    }
    missing = 0;
#pragma unroll
    for (u32 k = 0; k < COUNT; ++k) {
      const bool first = (u32)(a[k].first >> 32) == epoch && (u32)(a[k].second >> 32) == epoch;
      const bool second = (u32)(b[k].first >> 32) == epoch && (u32)(b[k].second >> 32) == epoch;
      missing |= first && second ? 0 : from[k].names;
      v[k] = {(u32)a[k].first, (u32)a[k].second, (u32)b[k].first, (u32)b[k].second};
    }
  } while (missing != 0 && keep_waiting(wait, common, missing));
}
