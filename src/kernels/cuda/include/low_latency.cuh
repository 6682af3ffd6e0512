// LL lines (NCCL's LL protocol): short messages whose data carry their own flags, in one trip over
// the link and without a fence. Half of the traffic is flags, so long messages use other protocols.
//
// A unit travels as two lines of two halves. Each half has 4 bytes of data and 4 bytes of flag,
// which arrive together: the flag says that the data have arrived. The flag is the block's epoch,
// which the kernel counts in device memory. So a replayed graph continues where the last call
// ended, and nothing is ever cleared.
//
// Two buffers, selected by the epoch's parity, suffice because a block that ends an epoch knows
// that the same block of every peer has started it: it has received from each peer, or from a rank
// that had received from that peer (all_reduce/cube_mesh.cu). So a block that writes to the buffer
// of epoch e + 2 has ended e + 1, which every peer started after it had read all of e.
#pragma once
#include "units.cuh"
#include "wait.cuh"

// Location of the LL lines in a channel.
struct LowLatency {
  // Offsets in the channel of the blocks' epochs, and of the lines: [block][parity][source][unit],
  // two lines each.
  u64 epochs;
  u64 lines;
  // Number of units of one message that one block carries in an epoch, which is the capacity of its
  // buffer.
  u32 units;
};

// A rank to receive from, and the ranks (a bit each) to name if nothing arrives.
struct Source {
  u32 rank;
  u32 names;
};

// Returns the number of units sent for `units` of data: at least one goes to every peer, with or
// without data.
DEVICE u32 at_least_one(u32 units) {
  return units == 0 ? 1 : units;
}

// Stores a unit as two lines, with `flag` in each half.
DEVICE void store_lines(Line* line, Unit v, u32 flag) {
  const u64 high = (u64)flag << 32;
  store_relaxed(line, {high | v.x, high | v.y});
  store_relaxed(line + 1, {high | v.z, high | v.w});
}

// Returns true if all four halves of a unit's lines have the flag.
DEVICE bool have_arrived(Line a, Line b, u32 flag) {
  const bool first_line = (u32)(a.first >> 32) == flag && (u32)(a.second >> 32) == flag;
  const bool second_line = (u32)(b.first >> 32) == flag && (u32)(b.second >> 32) == flag;
  return first_line && second_line;
}

// Returns the unit that two lines carry.
DEVICE Unit data_of(Line a, Line b) {
  return {(u32)a.first, (u32)a.second, (u32)b.first, (u32)b.second};
}

// Session of this block on the LL lines (NCCL: ncclLLA2ASession): `begin`, any number of `send` and
// `receive`, `end`. Each thread sends and receives different units; the whole block calls `begin`
// and `end`. A session hides from kernels how epochs select buffers. In this example, every rank
// sends one unit to each peer and receives one unit from each peer:
//   LowLatencySession session(args.common, args.ll);
//   session.begin();
//   for_each_peer([&](u32 r) { session.send(r, thread(), mine); });
//   session.receive(thread(), all_peers(), theirs);
//   session.end();
struct LowLatencySession {
  const Common& common;
  const LowLatency place;
  u32 epoch;
  // Offset of this block's lines, and the number of their bytes for each source.
  u64 base;
  u64 stride;
  // The first unit of every message that this block carries in this epoch.
  u64 first;
  Wait wait;

  DEVICE LowLatencySession(const Common& common, const LowLatency& place)
      : common(common), place(place), wait(common) {}

  // Returns the word with the epoch of this block's last call.
  DEVICE u32* last_epoch() const {
    return (u32*)(common.peer[RANK] + place.epochs + (u64)block() * 4);
  }

  // Takes the epoch that follows `last`.
  DEVICE void follow(u32 last) {
    // Epoch 0 is skipped, because memory initially contains zeros. 2 follows, not 1, because
    // parities alternate.
    epoch = last + 1 == 0 ? 2 : last + 1;
    stride = (u64)place.units * 32;
    base = place.lines + (u64)(block() * 2 + (epoch & 1)) * WORLD * stride;
  }

  // Starts the block's first epoch of a call, which follows the epoch of its last call.
  DEVICE void begin() {
    follow(*last_epoch());
    first = (u64)block() * place.units;
  }

  // Starts another epoch of the same call, for the units that all blocks together could not carry
  // in the current epoch, once all threads of the block have finished the current epoch.
  DEVICE void next_epoch() {
    sync_block();
    follow(epoch);
    first += (u64)blocks() * place.units;
  }

  // Saves the block's epoch for its next call, once all threads of the block have finished it.
  DEVICE void end() const {
    sync_block();
    if (thread() == 0) {
      *last_epoch() = epoch;
    }
  }

  // Returns how many units of a message of `bytes` this block carries in this epoch.
  DEVICE u32 share(u64 bytes) const {
    const u64 units = units_of(bytes);
    return units <= first ? 0 : (u32)smaller(units - first, (u64)place.units);
  }

  // Sends a unit, with the epoch as its flag, to rank `to`, unless this thread's wait is over: the
  // unit may have been computed from units that never arrived.
  DEVICE void send(u32 to, u32 unit, Unit v) const {
    if (!wait.over) {
      store_lines((Line*)(common.peer[to] + base + RANK * stride + (u64)unit * 32), v, epoch);
    }
  }

  // Sends each peer r the units of its message that this block carries, `units[r]` units, at most
  // `longest`. `load(r, offset)` returns the unit at an offset in the message. At least one line
  // goes to every peer.
  template <typename Load>
  DEVICE void send_each(const u32 (&units)[WORLD], u32 longest, Load load) const {
    for (u32 i = thread(); i < longest; i += threads()) {
      const u64 offset = (first + i) * 16;
      Unit v[WORLD];
      for_each_peer([&](u32 r) {
        v[r] = {0, 0, 0, 0};
        if (i < units[r]) {
          v[r] = load(r, offset);
        }
      });
      for_each_peer([&](u32 r) {
        if (i < at_least_one(units[r])) {
          send(r, i, v[r]);
        }
      });
    }
  }

  // Waits for `unit` of every rank in `sources` (a bit each) and loads it into `v`; each poll loads
  // the units of all peers.
  DEVICE void receive(u32 unit, u32 sources, Unit (&v)[WORLD]) {
    const u8* own = common.peer[RANK] + base + (u64)unit * 32;
    u32 missing;
    bool waiting;
    do {
      Line a[WORLD], b[WORLD];
      for_each_peer([&](u32 r) {
        const Line* line = (const Line*)(own + r * stride);
        a[r] = load_relaxed(line);
        b[r] = load_relaxed(line + 1);
      });
      missing = 0;
      waiting = false;
      for_each_peer([&](u32 r) {
        const bool lacking = !have_arrived(a[r], b[r], epoch) && (sources >> r & 1);
        missing |= lacking ? 1u << r : 0;
        waiting |= lacking;
        v[r] = data_of(a[r], b[r]);
      });
      // Not `missing != 0`: for 3 ranks the assembler of CUDA 13.0 turns "no bit is set" into "not
      // both bits are set".
    } while (waiting && wait.look_again(missing));
  }

  // Waits for `unit` of the ranks `from`, which are known only at run time; each poll loads the
  // units of all these ranks.
  template <u32 COUNT>
  DEVICE void receive_from(const Source (&from)[COUNT], u32 unit, Unit (&v)[COUNT]) {
    const u8* own = common.peer[RANK] + base + (u64)unit * 32;
    u32 missing;
    do {
      Line a[COUNT], b[COUNT];
#pragma unroll
      for (u32 k = 0; k < COUNT; ++k) {
        const Line* line = (const Line*)(own + from[k].rank * stride);
        a[k] = load_relaxed(line);
        b[k] = load_relaxed(line + 1);
      }
      missing = 0;
#pragma unroll
      for (u32 k = 0; k < COUNT; ++k) {
        missing |= have_arrived(a[k], b[k], epoch) ? 0 : from[k].names;
        v[k] = data_of(a[k], b[k]);
      }
    } while (missing != 0 && wait.look_again(missing));
  }

  // Waits for `unit` of every peer and reduces it with this rank's `own`; `reduce(v)` combines one
  // unit of each rank.
  template <typename Reduce>
  DEVICE Unit receive_reduce(u32 unit, Unit own, Reduce reduce) {
    Unit v[WORLD];
    v[RANK] = own;
    receive(unit, all_peers(), v);
    return reduce(v);
  }
};
