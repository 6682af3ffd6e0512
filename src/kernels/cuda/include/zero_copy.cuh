// Start and end of a call on symmetric memory: what ranks may load from each other and store at each other, and that they have done so.
//
// Every block of a zero-copy kernel tells the same block of every peer at the start where that peer may load and store, and at the end that it
// has; and it hears the same of every peer. Both travel low-latency, on lines of their own: two rounds of each call. So no rank has to
// know on the host what the others' tensors are, and no kernel ends while a peer may still use this rank's memory.
#pragma once
#include "low_latency.cuh"

// Of one rank in one round: two numbers, and a factor.
#define HANDSHAKE_UNITS 2u

struct Handshake {
  // Offsets in the channel: the blocks' epochs, then [block][parity][source][unit] of two lines, then how many calls went direct.
  u64 epochs;
  u64 lines;
  u64 counts;
  // Where the symmetric memory of each rank begins, as mapped here.
  u64 heap[MAX_WORLD];
  // A bit for each rank: what this rank gives it, and what it takes from it, lies in symmetric memory that all peers have mapped,
  // aligned to 16 bytes.
  u32 give;
  u32 take;
  // Index of this channel's count in the report.
  u32 channel;
  // Of exchanges: shorter messages are staged, wherever they go. Not 0.
  u32 least;
};
static_assert(sizeof(Handshake) == 168, "");

DEVICE LowLatency lines_of(const Handshake& handshake) {
  return {handshake.epochs, handshake.lines, HANDSHAKE_UNITS};
}

// How peers learn of an address of this rank's symmetric memory; 0: of none.
DEVICE u64 handshake_word(const Handshake& handshake, bool symmetric, const u8* at) {
  return symmetric ? (u64)at - handshake.heap[RANK] + 1 : 0;
}

// The address that `rank` told of, as mapped here; null: none.
DEVICE u8* tensor_of(const Handshake& handshake, u32 rank, u64 number) {
  return number == 0 ? nullptr : (u8*)(handshake.heap[rank] + number - 1);
}

DEVICE Unit unit_of(u64 first, u64 second) {
  return {(u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32)};
}
DEVICE u64 first_of(Unit v) {
  return v.x | (u64)v.y << 32;
}
DEVICE u64 second_of(Unit v) {
  return v.z | (u64)v.w << 32;
}

// Whom a block tells at the start and hears at the end, and whom it hears at the start and tells at the end; a bit each.
struct Partners {
  u32 to;
  u32 from;
};
#define EVERYBODY (Partners{~0u, ~0u})

// The whole block: tells rank r `word_for(r)`, two numbers, and hears as much of it, where they are partners. False, for all of the block, if some rank did not come:
// then nothing that was heard may be used, and the block ends without a further word. If true, what peers wrote before their calls is
// visible.
template <typename WordFor>
DEVICE bool begin_handshake(const Common& common, const Round& round, Partners partners, WordFor word_for, Line (&words)[WORLD]) {
  const u32 to = thread();
  if (to < WORLD && to != RANK && (partners.to >> to & 1)) {
    const Line own = word_for(to);
    push_unit(common, round, to, 0, unit_of(own.first, own.second));
  }
  Wait wait;
  Unit v[WORLD];
  pull_units(common, round, 0, partners.from, v, wait);
#pragma unroll
  for (u32 k = 1; k < WORLD; ++k) {
    const u32 r = (RANK + k) % WORLD;
    // What stands in the lines of others is of an earlier call.
    const bool partner = partners.from >> r & 1;
    words[r] = {partner ? first_of(v[r]) : 0, partner ? second_of(v[r]) : 0};
  }
  words[RANK] = word_for(RANK);
  const bool all = sync_block_and(!wait.over);
  fence_system();
  return all;
}

// A further number of each rank, within the round that begin_handshake began.
DEVICE bool hear_numbers(const Common& common, const Round& round, u64 own, u64 (&number)[WORLD]) {
  const u32 to = thread();
  if (to < WORLD && to != RANK) {
    push_unit(common, round, to, 1, unit_of(own, 0));
  }
  Wait wait;
  Unit v[WORLD];
  pull_units(common, round, 1, ~0u, v, wait);
#pragma unroll
  for (u32 k = 1; k < WORLD; ++k) {
    const u32 r = (RANK + k) % WORLD;
    number[r] = first_of(v[r]);
  }
  number[RANK] = own;
  return sync_block_and(!wait.over);
}

// The whole block: returns once the same block of every partner is done, what it stored here is visible then.
DEVICE void end_handshake(const Common& common, const Handshake& handshake, const Round& opened, Partners partners) {
  // Begins with a barrier: all that this block loads and stores is done.
  const Round round = next_round(lines_of(handshake), opened);
  const u32 r = thread();
  if (r < WORLD && r != RANK) {
    if (partners.from >> r & 1) {
      fence_system();
      push_unit(common, round, r, 0, {0, 0, 0, 0});
    }
    if (partners.to >> r & 1) {
      // Its own: the time until here was spent on data, which has deadlines of its own.
      Wait wait;
      const Source from[1] = {{r, 1u << r}};
      Unit nothing[1];
      pull_from(common, round, 0, from, nothing, wait);
      fence_system();
    }
  }
  end_round(common, lines_of(handshake), round);
}

// Closes the handshake wherever the kernel returns.
struct Closing {
  const Common& common;
  const Handshake& handshake;
  const Round& opened;
  DEVICE ~Closing() { end_handshake(common, handshake, opened, EVERYBODY); }
};

// A kernel of this channel moved something to or from tensors of peers; for the host to see. One block of the kernel is the `first`.
DEVICE void count_direct(const Common& common, const Handshake& handshake, bool first) {
  if (first && thread() == 0) {
    u32* counts = (u32*)(common.peer[RANK] + handshake.counts);
    const u32 count = *counts + 1;
    *counts = count;
    store_relaxed(&common.report->direct[handshake.channel], count);
  }
}
