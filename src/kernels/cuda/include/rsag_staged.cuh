// Roles of algorithms that divide a long message into one piece per rank:
//   - role 0, scatter: sends each rank its piece.
//   - role 1, gather: computes the result of this rank's piece from the chunks that arrive, and
//     sends it to the targets.
//   - role 2, gather: receives the results of the other ranks' pieces.
//
// Each role has a block per lane, and the chunks pass through all three roles as a pipeline.
#pragma once
#include "zero_copy.cuh"
#include "staged_roles.cuh"

// Arguments of rsag_staged and broadcast_staged.
struct RsagStagedArgs {
  Common common;
  // The two trips; lanes and slot size are the same in both.
  Staging scatter;
  Staging gather;
  const u8* from;
  u8* to;
  u64 bytes;
  double factor;
  // Root of a broadcast.
  u32 root;
  // Number of pieces, and the rank of the first piece.
  u32 parts;
  u32 first;
  // Mask of the ranks that get the result of a reduction.
  u32 targets;
  // Handshake of zero-copy calls.
  Handshake handshake;
};
static_assert(sizeof(RsagStagedArgs) == 440, "");

// Computes the start and length of each rank's piece: whole units, except that the last piece may
// end within one. A rank without a piece has length 0.
DEVICE void pieces_of(const RsagStagedArgs& args, u64* start, u64* length) {
  const u64 stride = (units_of(args.bytes) + args.parts - 1) / args.parts * 16;
  for_each_rank([&](u32 r) {
    start[r] = smaller(stride * ((r + WORLD - args.first) % WORLD), args.bytes);
    length[r] = smaller(stride, args.bytes - start[r]);
  });
}

// Role 0: sends each rank its piece of `args.from`, chunk by chunk.
template <typename Lift>
DEVICE void scatter(const RsagStagedArgs& args, u32 lane, Lift lift) {
  u64 start[WORLD];
  Outgoing out;
  pieces_of(args, start, out.bytes);
  for_each_rank([&](u32 r) { out.from[r] = args.from + start[r]; });
  out.same = 0;
  SendSession session(args.common, args.scatter, lane);
  send_pieces(session, out, ~0u, ChunkOfCall{args.scatter.chunk_bytes}, lift);
}

// Destinations of results that are stored directly to tensors: `ranks` has a bit for each rank with
// such a tensor, and `at` has the start of the tensor.
struct Destinations {
  u32 ranks;
  u8* at[WORLD];
};

// Role 1: computes the result of this rank's piece from the chunks of `sources` and sends it to
// `targets` and to `args.to`. `make(slot, unit, offset)` returns the result of the unit at `offset`
// of the message, given the slots of the scatter stage. Returns false, to the whole block, if a
// thread timed out; then the results of some chunks were neither computed nor sent.
template <bool PLACED, typename Make>
DEVICE bool gather_to(
    const RsagStagedArgs& args, u32 lane, u32 sources, u32 targets,
    const Destinations& destinations, Make make) {
  // step 1: find this rank's piece, start where the last call ended
  u64 start[WORLD], length[WORLD];
  pieces_of(args, start, length);
  const u64 own = start[RANK], bytes = length[RANK];
  const u32 staged = PLACED ? targets & ~destinations.ranks : targets;
  ReceiveSession in(args.common, args.scatter, lane);
  SendSession out(args.common, args.gather, lane);
  in.begin();
  out.begin();
  const u32 chunk = args.scatter.chunk_bytes;
  const u32 steps = in.chunks(bytes, chunk);
  bool all = true;
  // step 2: repeat steps 3 to 6 for every chunk of the piece
  for (u32 step = 0; step < steps; ++step) {
    const u32 units = (u32)units_of(in.length(bytes, step, chunk));
    const u64 first = own + in.start(step, chunk);
    // step 3: wait until every target has read the previous chunks in the slots that the results
    // will use
    const Unit* slot[WORLD];
    Unit* to[WORLD];
    for_each_rank([&](u32 r) {
      slot[r] = in.slot(r);
      to[r] = out.slot(r);
      if (PLACED && (destinations.ranks >> r & 1)) {
        to[r] = (Unit*)(destinations.at[r] + first);
      }
      if (staged >> r & 1) {
        out.await_credit(r);
      }
    });
    // step 4: wait for the chunk of every source; end if a thread timed out here or in step 3
    all = in.receive(sources, !out.wait.over);
    if (!all) {
      break;
    }
    // step 5: compute each result, store it at every target and here
    for (u32 i = thread(); i < units; i += threads()) {
      const u64 offset = first + (u64)i * 16;
      const Unit v = make(slot, i, offset);
      // Slots have capacity for whole units; a tensor may end within a unit.
      const bool whole = !PLACED || args.bytes - offset >= 16;
      for_each_peer([&](u32 r) {
        if (targets >> r & 1) {
          if (whole || (staged >> r & 1)) {
            to[r][i] = v;
          } else {
            store_unit((u8*)(to[r] + i), v, args.bytes - offset);
          }
        }
      });
      if (args.to != nullptr) {
        store_unit(args.to + offset, v, args.bytes - offset);
      }
    }
    // step 6: release the slots that were read, notify the targets that the results have arrived
    sync_block();
    in.release(sources);
    out.send(staged);
  }
  // step 7: save the counts for the next call
  in.end();
  out.end();
  return all;
}

// Role 1 without a handshake: every result uses slots.
template <typename Make>
DEVICE void gather(const RsagStagedArgs& args, u32 lane, u32 sources, u32 targets, Make make) {
  gather_to<false>(args, lane, sources, targets, Destinations{}, make);
}

#ifdef SYMM_ZERO_COPY
// Role 1 of a zero-copy call: results are stored directly to the tensors that partners name in the
// handshake; the others use slots.
template <typename Make>
DEVICE void gather_zero_copy(
    const RsagStagedArgs& args, u32 lane, u32 sources, u32 targets, Partners partners, Make make) {
  // step 1: start the handshake, in which partners send the addresses of their results
  const Handshake& handshake = args.handshake;
  HandshakeSession session(args.common, handshake, partners);
  session.begin();
  const auto word_for = [&](u32 r) -> Line {
    return {session.word(handshake.take >> r & 1, args.to), 0};
  };
  Line words[WORLD];
  if (!session.exchange(word_for, words)) {
    return;
  }
  // step 2: find the targets whose results are in symmetric memory
  Destinations destinations{};
  for_each_rank([&](u32 r) {
    destinations.at[r] = session.tensor(r, words[r].first);
    destinations.ranks |= words[r].first != 0 ? targets & 1u << r : 0;
  });
  // step 3: compute the results and send them. A block that timed out does not end the handshake,
  // so no partner takes missing results for valid ones.
  if (!gather_to<true>(args, lane, sources, targets, destinations, make)) {
    return;
  }
  if (destinations.ranks != 0 || handshake.take != 0) {
    session.count_direct(lane == 0);
  }
  // step 4: end the handshake: afterwards no partner accesses this rank's memory
  session.end();
}
#endif

// Role 2: receives the results of the other ranks' pieces through slots and stores them at
// `args.to`.
DEVICE void gather(const RsagStagedArgs& args, u32 lane) {
  u64 start[WORLD], length[WORLD];
  u8* to[WORLD];
  pieces_of(args, start, length);
  for_each_rank([&](u32 r) { to[r] = args.to + start[r]; });
  ReceiveSession session(args.common, args.gather, lane);
  receive_pieces(
      session, length, ~0u, ChunkOfCall{args.gather.chunk_bytes}, CopyOut<ChunkOfCall>{to, length});
}
