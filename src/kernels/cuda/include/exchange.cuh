// Exchange of messages between all ranks: its arguments, and its short messages. Short messages use
// LL lines, with at least one line to every peer.
#pragma once
#include "zero_copy_moves.cuh"
#include "low_latency.cuh"
#include "staged_roles.cuh"

struct ExchangeArgs {
  Common common;
  LowLatency ll;
  Staging staging;
  // Number of blocks that use LL lines; 0 if no rank uses them in this call. Staging has 2 blocks
  // per lane: a receiver, and a sender that also copies the rank's own message.
  u32 ll_blocks;
  // Maximum length of a message on LL lines; longer ones are staged.
  u64 short_bytes;
  Outgoing out;
  u8* to[MAX_WORLD];
  u64 bytes[MAX_WORLD];
  // Handshake of zero-copy calls; only the bits of `take` are used.
  Handshake handshake;
};
static_assert(sizeof(ExchangeArgs) == 920, "");

// Returns the length of the rank's message to itself; 0 if it is already in place.
DEVICE u64 own_bytes(const ExchangeArgs& args) {
  const u8 *from = args.out.from[RANK], *to = args.to[RANK];
  return from != nullptr && to != nullptr && from != to ? args.out.bytes[RANK] : 0;
}

// Copies the rank's message to itself; all blocks of the grid stride over it together.
DEVICE void keep_own(const ExchangeArgs& args) {
  const u8* from = args.out.from[RANK];
  u8* to = args.to[RANK];
  const u64 bytes = own_bytes(args), units = units_of(bytes);
  const auto [first, step] = stride_of_grid();
  const auto load = [&](u64 at) { return load_unit(from + at * 16, bytes - at * 16); };
  move_units(first, units, step, load, [&](u64 at, Unit v) {
    store_unit(to + at * 16, v, bytes - at * 16);
  });
}

// Computes how many units of each peer's short message this block carries. Returns the maximum, at
// least 1.
DEVICE u32 short_units(
    const ExchangeArgs& args, const LowLatencySession& session, const u64* bytes,
    u32 (&units)[WORLD]) {
  u32 longest = 1;
  for_each_peer([&](u32 r) {
    units[r] = bytes[r] <= args.short_bytes ? session.share(bytes[r]) : 0;
    longest = larger(units[r], longest);
  });
  return longest;
}

// Sends this block's share of every short message on LL lines.
DEVICE void send_short(const ExchangeArgs& args, const LowLatencySession& session) {
  u32 units[WORLD];
  const u32 longest = short_units(args, session, args.out.bytes, units);
  session.send_each(units, longest, [&](u32 r, u64 offset) {
    return load_unit(args.out.from[r] + offset, args.out.bytes[r] - offset);
  });
}

// Receives this block's share of every peer's short message and stores it.
DEVICE void receive_short(const ExchangeArgs& args, LowLatencySession& session) {
  u32 units[WORLD];
  const u32 longest = short_units(args, session, args.bytes, units);
  for (u32 i = thread(); i < longest; i += threads()) {
    const u64 offset = (session.first + i) * 16;
    u32 sources = 0;
    for_each_peer([&](u32 r) { sources |= i < at_least_one(units[r]) ? 1u << r : 0; });
    Unit v[WORLD];
    session.receive(i, sources, v);
    for_each_peer([&](u32 r) {
      if (i < units[r]) {
        store_unit(args.to[r] + offset, v[r], args.bytes[r] - offset);
      }
    });
  }
}
