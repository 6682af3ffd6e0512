// Zero-copy handshake: start and end of a call on symmetric memory.
//
// At the start, every block of a zero-copy kernel sends the same block of every peer the addresses
// that this peer may load and store; at the end, it notifies the same blocks that it has finished.
// Start and end each use one epoch of separate LL lines. So no rank has to know the others' tensors
// on the host, and no kernel ends while a peer may still access this rank's memory.
#pragma once
#include "low_latency.cuh"

// Number of units of one rank in one epoch: two numbers, and a factor.
#define HANDSHAKE_UNITS 2u

// Arguments of the zero-copy handshake.
struct Handshake {
  // Offsets in the channel of the blocks' epochs, of the lines ([block][parity][source][unit], two
  // lines each), and of the count of zero-copy calls.
  u64 epochs;
  u64 lines;
  u64 counts;
  // Start of each rank's symmetric memory, as mapped in this process.
  u64 heap[MAX_WORLD];
  // Masks with a bit for each rank. In `give` the bit is set if this rank's message for that rank
  // is in symmetric memory that all peers have mapped, aligned to 16 bytes. In `take` it is set if
  // the same holds for the destination of that rank's message.
  u32 give;
  u32 take;
  // Index in `Report::direct` of the count of this channel's zero-copy collectives or sends. The
  // next word counts the channel's zero-copy receives.
  u32 count;
  // Minimum length of a zero-copy message of an exchange, not 0; shorter ones are staged.
  u32 least;
};
static_assert(sizeof(Handshake) == 168, "");

// Converts between a unit and two numbers.
DEVICE Unit unit_of(u64 first, u64 second) {
  return {(u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32)};
}
DEVICE u64 first_of(Unit v) {
  return v.x | (u64)v.y << 32;
}
DEVICE u64 second_of(Unit v) {
  return v.z | (u64)v.w << 32;
}

// Masks of a block's partners, a bit each. At the start the block sends to the ranks in `to` and
// waits for the ranks in `from`; at the end it sends to `from` and waits for `to`.
struct Partners {
  u32 to;
  u32 from;
};
#define EVERYBODY (Partners{~0u, ~0u})

// Session of this block in the handshake of a call: `begin`, `exchange`, `end` (NCCL:
// ncclLsaBarrierSession at both ends of a kernel). The whole block calls each of them. Every block
// of every rank calls `begin` and `end`, with partners or without, so that all count the same
// epochs. It ensures that kernels access peers' tensors only between the peers' start and end of
// the call. In this example, each thread reads one unit of a tensor of rank r:
//   HandshakeSession session(args.common, args.handshake, EVERYBODY);
//   session.begin();
//   Line words[WORLD];
//   if (!session.exchange([&](u32) { return Line{session.word(true, mine), 0}; }, words)) return;
//   theirs = load_unit(session.tensor(r, words[r].first) + thread() * 16, 16);
//   session.end();
struct HandshakeSession {
  const Common& common;
  const Handshake& handshake;
  const Partners partners;
  LowLatencySession lines;

  DEVICE HandshakeSession(const Common& common, const Handshake& handshake, Partners partners)
      : common(common),
        handshake(handshake),
        partners(partners),
        lines(common, {handshake.epochs, handshake.lines, HANDSHAKE_UNITS}) {}

  DEVICE void begin() { lines.begin(); }

  // Returns the handshake word for the address `at`; 0 unless it is in symmetric memory.
  DEVICE u64 word(bool symmetric, const u8* at) const {
    return symmetric ? (u64)at - handshake.heap[RANK] + 1 : 0;
  }

  // Returns the address that the handshake word of `rank` names, as mapped in this process; null
  // for none.
  DEVICE u8* tensor(u32 rank, u64 word) const {
    return word == 0 ? nullptr : (u8*)(handshake.heap[rank] + word - 1);
  }

  // Sends each partner r the two numbers `word_for(r)`, and receives its two numbers in `words`.
  // Returns true, to the whole block, if all partners arrived; their writes before their calls are
  // then visible. Returns false if a rank did not arrive: then `words` must not be used, and the
  // block ends without sending anything else.
  template <typename WordFor>
  DEVICE bool exchange(WordFor word_for, Line (&words)[WORLD]) {
    // step 1: thread r sends this rank's numbers to rank r
    const u32 to = thread();
    if (to < WORLD && to != RANK && (partners.to >> to & 1)) {
      const Line own = word_for(to);
      lines.send(to, 0, unit_of(own.first, own.second));
    }
    // step 2: wait for the partners' numbers
    lines.wait.restart();
    Unit v[WORLD];
    lines.receive(0, partners.from, v);
    for_each_peer([&](u32 r) {
      // The lines of ranks that are not partners hold numbers of an earlier call.
      const bool partner = partners.from >> r & 1;
      words[r] = {partner ? first_of(v[r]) : 0, partner ? second_of(v[r]) : 0};
    });
    words[RANK] = word_for(RANK);
    // step 3: agree within the block, and acquire the peers' writes before their calls
    const bool all = sync_block_and(!lines.wait.over);
    fence_system();
    return all;
  }

  // Exchanges one more number with every rank. Returns false if a rank did not arrive.
  DEVICE bool exchange_further(u64 own, u64 (&number)[WORLD]) {
    const u32 to = thread();
    if (to < WORLD && to != RANK) {
      lines.send(to, 1, unit_of(own, 0));
    }
    lines.wait.restart();
    Unit v[WORLD];
    lines.receive(1, ~0u, v);
    for_each_peer([&](u32 r) { number[r] = first_of(v[r]); });
    number[RANK] = own;
    return sync_block_and(!lines.wait.over);
  }

  // Counts, for the host, a kernel of this channel that accessed peers' tensors directly. One block
  // of the kernel is the `first`, and counts.
  DEVICE void count_direct(bool first) const {
    if (first && thread() == 0) {
      u32* counts = (u32*)(common.peer[RANK] + handshake.counts);
      const u32 count = *counts + 1;
      *counts = count;
      store_relaxed(&common.report->direct[handshake.count], count);
    }
  }

  // Returns once the same block of every partner has finished; its stores to this rank's memory are
  // then visible.
  DEVICE void end() {
    // step 1: start an epoch, which includes a barrier of the block: all its loads and stores are
    // complete
    lines.next_epoch();
    const u32 r = thread();
    if (r < WORLD && r != RANK) {
      // step 2: thread r notifies rank r that this block has finished with rank r's memory
      if (partners.from >> r & 1) {
        fence_system();
        lines.send(r, 0, {0, 0, 0, 0});
      }
      // step 3: wait until rank r has finished with this rank's memory
      if (partners.to >> r & 1) {
        // The wait has a new deadline: the time until here was spent on data, which have their own
        // deadlines.
        lines.wait.restart();
        const Source from[1] = {{r, 1u << r}};
        Unit nothing[1];
        lines.receive_from(from, 0, nothing);
        fence_system();
      }
    }
    lines.end();
  }
};

// Ends a handshake wherever the kernel returns.
struct EndOfHandshake {
  HandshakeSession& session;
  DEVICE ~EndOfHandshake() { session.end(); }
};
