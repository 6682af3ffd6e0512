// A long message in pieces: each goes to a rank of its own (scatter), which makes the result of it and sends that to everybody (spread),
// who take it from there (gather). Each role has a block per lane; chunk follows chunk through all three at once.
#pragma once
#include "gate.cuh"
#include "pieces.cuh"

struct TwoStageArgs {
  Common common;
  // Lanes and slot size are the same in both.
  Staging scatter;
  Staging spread;
  const u8* from;
  u8* to;
  u64 bytes;
  double factor;
  // Of a broadcast.
  u32 root;
  // The pieces, and who has the first of them.
  u32 parts;
  u32 first;
  // Of a reduction: the ranks that get the result, a bit each.
  u32 targets;
  // Of gated calls.
  Gate gate;
};
static_assert(sizeof(TwoStageArgs) == 440, "");

// Each rank's piece: whole units, the last may be shorter; empty where there are fewer pieces than ranks.
DEVICE void pieces_of(const TwoStageArgs& args, u64* start, u64* length) {
  const u64 stride = (units_of(args.bytes) + args.parts - 1) / args.parts * 16;
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    start[r] = smaller(stride * ((r + WORLD - args.first) % WORLD), args.bytes);
    length[r] = smaller(stride, args.bytes - start[r]);
  }
}

template <typename Lift>
DEVICE void scatter(const TwoStageArgs& args, u32 lane, Lift lift) {
  u64 start[WORLD];
  Outgoing out;
  pieces_of(args, start, out.bytes);
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    out.from[r] = args.from + start[r];
  }
  out.same = 0;
  Stage stage(args.common, args.scatter, lane);
  send_pieces(stage, out, ~0u, ChunkOfCall{args.scatter.chunk_bytes}, lift);
}

// Where results go other than into slots: for the ranks in `ranks`, a bit each, into their tensors, which begin at `at`.
struct Places {
  u32 ranks;
  u8* at[WORLD];
};

// `make(slot, unit, offset)`: the result of the unit at `offset` of the message, given the slots of the scatter stage.
template <bool PLACED, typename Make>
DEVICE void spread_to(const TwoStageArgs& args, u32 lane, u32 sources, u32 targets, const Places& places, Make make) {
  u64 start[WORLD], length[WORLD];
  pieces_of(args, start, length);
  const u64 own = start[RANK], bytes = length[RANK];
  const u32 staged = PLACED ? targets & ~places.ranks : targets;
  Stage in(args.common, args.scatter, lane);
  Stage out(args.common, args.spread, lane);
  u32 taken[WORLD], sent[WORLD], credit[WORLD];
  in.load_counts(in.words(RANK)->taken, taken);
  out.load_counts(out.words(RANK)->sent, sent);
  out.load_credit(credit);
  const u32 chunk = args.scatter.chunk_bytes;
  const u64 steps = in.chunks(bytes, chunk);
  for (u64 step = 0; step < steps; ++step) {
    const u32 units = (u32)units_of(in.length(bytes, step, chunk));
    const u64 first = own + in.start(step, chunk);
    const Unit* slot[WORLD];
    Unit* to[WORLD];
#pragma unroll
    for (u32 r = 0; r < WORLD; ++r) {
      slot[r] = in.slot(RANK, r, taken[r]);
      to[r] = out.slot(r, RANK, sent[r]);
      if (PLACED && (places.ranks >> r & 1)) {
        to[r] = (Unit*)(places.at[r] + first);
      }
      if (staged >> r & 1) {
        out.await_credit(r, sent[r], credit[r]);
      }
    }
    in.await_arrival(taken, sources);
    for (u32 i = thread(); i < units; i += threads()) {
      const u64 offset = first + (u64)i * 16;
      const Unit v = make(slot, i, offset);
      // Slots have room for whole units; tensors end where they end.
      const bool whole = !PLACED || args.bytes - offset >= 16;
#pragma unroll
      for (u32 k = 1; k < WORLD; ++k) {
        const u32 r = (RANK + k) % WORLD;
        if (targets >> r & 1) {
          if (whole || (staged >> r & 1)) {
            to[r][i] = v;
          } else {
            store_unit((u8*)(to[r] + i), v, args.bytes - offset);
          }
        }
      }
      if (args.to != nullptr) {
        store_unit(args.to + offset, v, args.bytes - offset);
      }
    }
    sync_block();
    in.give_back(taken, sources);
    out.announce(sent, staged);
    advance(taken, sources);
    advance(sent, staged);
  }
  in.save_counts(in.words(RANK)->taken, taken);
  out.save_counts(out.words(RANK)->sent, sent);
}

template <typename Make>
DEVICE void spread(const TwoStageArgs& args, u32 lane, u32 sources, u32 targets, Make make) {
  spread_to<false>(args, lane, sources, targets, Places{}, make);
}

#ifdef SYMM_GATED
// Who has results learns from the same block of its partners where theirs go.
template <typename Make>
DEVICE void spread_gated(const TwoStageArgs& args, u32 lane, u32 sources, u32 targets, Partners partners, Make make) {
  const Gate& gate = args.gate;
  const Round round = begin_round(args.common, lines_of(gate));
  const auto tell = [&](u32 r) -> Line { return {told(gate, gate.take >> r & 1, args.to), 0}; };
  Line said[WORLD];
  if (!open_gate(args.common, round, partners, tell, said)) {
    return;
  }
  Places places{};
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    places.at[r] = heard(gate, r, said[r].first);
    places.ranks |= said[r].first != 0 ? targets & 1u << r : 0;
  }
  spread_to<true>(args, lane, sources, targets, places, make);
  if (places.ranks != 0 || gate.take != 0) {
    count_direct(args.common, gate, lane == 0);
  }
  close_gate(args.common, gate, round, partners);
}
#endif

DEVICE void gather(const TwoStageArgs& args, u32 lane) {
  u64 start[WORLD], length[WORLD];
  u8* to[WORLD];
  pieces_of(args, start, length);
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    to[r] = args.to + start[r];
  }
  Stage stage(args.common, args.spread, lane);
  take_pieces(stage, length, ~0u, ChunkOfCall{args.spread.chunk_bytes}, CopyOut<ChunkOfCall>{to, length});
}
