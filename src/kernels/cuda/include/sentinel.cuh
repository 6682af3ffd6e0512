// Sentinel slots (TensorRT-LLM's Lamport buffers): floats that are their own flags. A slot holds
// words of all ones, which are NaNs that senders never send, until data overwrite them. The reader
// marks the slot as empty again once it has read it. Only data travel, without a fence, so a
// message is as fast as the link.
//
// Two buffers, selected by the parity of the block's epoch, suffice for the reason given in
// low_latency.cuh: in every call every block must receive from the same block of every peer, so
// each block needs a unit of every rank's piece.
#pragma once
#include "units.cuh"
#include "reduction.cuh"
#include "wait.cuh"

static_assert(EMPTY_IS_NAN, "a word of all ones is data for this element type");

// Location of the sentinel slots in a channel.
struct Sentinel {
  // Offsets in the channel of the blocks' epochs, and of the slots:
  // [block][parity][stage][source][unit].
  u64 epochs;
  u64 slots;
  // Number of units that one source has in one stage of one block.
  u32 units;
};

// Returns true if a word of the unit has not arrived.
DEVICE bool is_empty(Unit v) {
  return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u;
}

// Session of this block on the sentinel slots: `begin`, any number of `send` and `receive`, `end`.
// Each thread sends and receives different units; the whole block calls `begin` and `end`. A
// session has two stages with separate slots. It hides from kernels which slots are free. In this
// example, each thread adds one unit of every rank:
//   SentinelSession session(args.common, args.sentinel);
//   session.begin();
//   for_each_peer([&](u32 r) { session.send(0, r, thread(), scrub(mine)); });
//   sum = session.receive_reduce(0, thread(), mine);
//   session.end();
struct SentinelSession {
  const Common& common;
  const Sentinel& place;
  u32 epoch;
  // Offset of this block's slots, and the number of their bytes for each source in a stage.
  u64 base;
  u64 stride;
  Wait wait;

  DEVICE SentinelSession(const Common& common, const Sentinel& place)
      : common(common), place(place), wait(common) {}

  // Returns the word with the epoch of this block's last call.
  DEVICE u32* last_epoch() const { return (u32*)(common.peer[RANK] + place.epochs) + block(); }

  // Returns the slot on rank `at` for the unit that rank `from` sends to it in `stage`.
  DEVICE Unit* slot(u32 at, u32 stage, u32 from, u32 unit) const {
    return (Unit*)(common.peer[at] + base + (stage * WORLD + from) * stride) + unit;
  }

  // Starts the block's epoch of a call, which follows the epoch of its last call.
  DEVICE void begin() {
    epoch = *last_epoch() + 1;
    stride = (u64)place.units * 16;
    base = place.slots + (u64)(block() * 2 + (epoch & 1)) * 2 * WORLD * stride;
  }

  // Saves the block's epoch for its next call, once all threads of the block have finished it.
  DEVICE void end() const {
    sync_block();
    if (thread() == 0) {
      *last_epoch() = epoch;
    }
  }

  // Sends a unit without words of all ones (`scrub`) to rank `to`, unless this thread's wait is
  // over: the unit may have been computed from units that never arrived, and after a timeout the
  // slot may have a unit that `to` has not read.
  DEVICE void send(u32 stage, u32 to, u32 unit, Unit v) const {
    if (!wait.over) {
      store_relaxed(slot(to, stage, RANK, unit), v);
    }
  }

  // Waits for `unit` of every rank in `sources` (a bit each), loads it into `v` and marks its slot
  // as empty.
  DEVICE void receive(u32 stage, u32 unit, u32 sources, Unit (&v)[WORLD]) {
    Unit* const own = slot(RANK, stage, 0, unit);
    const u64 each = place.units;
    u32 missing;
    bool waiting;
    // step 1: load the slots of all sources until every one has data
    do {
      for_each_peer([&](u32 r) { v[r] = load_relaxed(own + r * each); });
      missing = 0;
      waiting = false;
      for_each_peer([&](u32 r) {
        const bool lacking = is_empty(v[r]) && (sources >> r & 1);
        missing |= lacking ? 1u << r : 0;
        waiting |= lacking;
      });
      // Not `missing != 0`, because of the assembler fault described in LowLatencySession::receive.
    } while (waiting && wait.look_again(missing));
    // step 2: mark the slots as empty for the epoch after the next one
    for_each_peer([&](u32 r) {
      if (sources >> r & 1) {
        store_relaxed(own + r * each, {~0u, ~0u, ~0u, ~0u});
      }
    });
  }

  // Waits for `unit` of every peer. Returns the sum of these and this rank's `own` in rank order,
  // without words of all ones.
  DEVICE Unit receive_reduce(u32 stage, u32 unit, Unit own) {
    Unit v[WORLD];
    v[RANK] = own;
    receive(stage, unit, all_peers(), v);
    return scrub(sum_in_order(v));
  }
};

// Returns the first unit of part `part` of `parts`; the parts differ by at most one unit.
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
