// Messages whose data carry their own flags: one trip over the link, no fence. Half of what travels is flags, so for short ones.
//
// A unit travels as two lines of two halves, each half 4 bytes of data and 4 of flag, which arrive together: the flag says that the data
// are there. The flag is the block's epoch, which the kernel itself counts in device memory: a replayed
// graph goes on where the last call ended, and nothing is ever cleared.
//
// Two buffers, by the epoch's parity, suffice because a block that ends an epoch knows that the same block of every peer has begun it:
// it has heard from each, or (all_reduce/cube_mesh.cu) from someone who had. So who writes into the buffer of epoch e + 2 has ended
// e + 1, which everybody began after they had read all of e.
#pragma once
#include "bytes.cuh"
#include "wait.cuh"

struct LowLatency {
  // Offsets in the channel: the blocks' epochs, then [block][parity][source][unit] of two lines.
  u64 epochs;
  u64 lines;
  // Units of one message that one block carries: also the room for it.
  u32 units;
};

struct Round {
  u32 epoch;
  // Where this block's lines begin, for each source `stride` bytes.
  u64 base;
  u64 stride;
  // The first unit of every message that is this block's.
  u64 first;
};

DEVICE Round round_after(const LowLatency& ll, u32 last, u64 first) {
  Round round;
  // 0 is what memory begins with; 2, not 1, since parities alternate.
  round.epoch = last + 1 == 0 ? 2 : last + 1;
  round.stride = (u64)ll.units * 32;
  round.base = ll.lines + (u64)(block() * 2 + (round.epoch & 1)) * WORLD * round.stride;
  round.first = first;
  return round;
}

DEVICE Round begin_round(const Common& common, const LowLatency& ll) {
  return round_after(ll, ((const u32*)(common.peer[RANK] + ll.epochs))[block()], (u64)block() * ll.units);
}

// Another round of the same call, for what all blocks together could not carry in this one.
DEVICE Round next_round(const LowLatency& ll, const Round& round) {
  sync_block();
  return round_after(ll, round.epoch, round.first + (u64)blocks() * ll.units);
}

// Not before all threads of the block are done with the round.
DEVICE void end_round(const Common& common, const LowLatency& ll, const Round& round) {
  sync_block();
  if (thread() == 0) {
    ((u32*)(common.peer[RANK] + ll.epochs))[block()] = round.epoch;
  }
}

// This block's share of a message of `bytes`, in units.
DEVICE u32 share(const Round& round, const LowLatency& ll, u64 bytes) {
  const u64 units = units_of(bytes);
  return units <= round.first ? 0 : (u32)smaller(units - round.first, ll.units);
}

// At least one line goes to everybody, with or without data.
DEVICE u32 at_least_one(u32 units) {
  return units == 0 ? 1 : units;
}

DEVICE void push_unit(const Common& common, const Round& round, u32 to, u32 unit, Unit v) {
  Line* line = (Line*)(common.peer[to] + round.base + RANK * round.stride + (u64)unit * 32);
  const u64 flag = (u64)round.epoch << 32;
  store_relaxed(line, {flag | v.x, flag | v.y});
  store_relaxed(line + 1, {flag | v.z, flag | v.w});
}

// Waits for `unit` of every rank in `sources` (a bit each); all are looked at together.
DEVICE void pull_units(const Common& common, const Round& round, u32 unit, u32 sources, Unit (&v)[WORLD], Wait& wait) {
  const u8* own = common.peer[RANK] + round.base + (u64)unit * 32;
  const u32 epoch = round.epoch;
  u32 missing;
  bool waiting;
  do {
    Line a[WORLD], b[WORLD];
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
      const u32 r = (RANK + k) % WORLD;
      const Line* line = (const Line*)(own + r * round.stride);
      a[r] = load_relaxed(line);
      b[r] = load_relaxed(line + 1);
    }
    missing = 0;
    waiting = false;
#pragma unroll
    for (u32 k = 1; k < WORLD; ++k) {
      const u32 r = (RANK + k) % WORLD;
      const bool first = (u32)(a[r].first >> 32) == epoch && (u32)(a[r].second >> 32) == epoch;
      const bool second = (u32)(b[r].first >> 32) == epoch && (u32)(b[r].second >> 32) == epoch;
      const bool lacking = !(first && second) && (sources >> r & 1);
      missing |= lacking ? 1u << r : 0;
      waiting |= lacking;
      v[r] = {(u32)a[r].first, (u32)a[r].second, (u32)b[r].first, (u32)b[r].second};
    }
    // Not `missing != 0`: for 3 ranks the assembler of CUDA 13.0 turns "no bit is set" into "not both are".
  } while (waiting && keep_waiting(wait, common, missing));
}

// A rank to hear from, and whom to name (a bit each) if nothing comes.
struct Source {
  u32 rank;
  u32 names;
};

// Waits for `unit` of these alone, known only when the kernel runs; all are looked at together.
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
