// Recv offers: the rest of a long message is stored directly to the receiver's tensor, if that is
// in symmetric memory.
//
// Only the two ends know of a send, and neither waits for the other: the sender starts with
// staging, polls for an offer between two chunks, and stores the other chunks directly once it has
// seen the offer. Each lane does so independently. One lane takes 4 steps:
//   1. The receiver clears `placed` and offers the offset of the destination in its heap, and the
//      number of bytes.
//   2. The sender sees the offer after it has sent some chunks. It stores the number of these
//      chunks to `placed`, stores the rest of its lane's chunks at their destination, fences, and
//      raises `arrived` by the number of the chunks that it has stored there.
//   3. The receiver waits for `arrived` as without an offer. Chunks after the number in `placed`
//      are already in place.
//   4. The receiver withdraws the offer: the sender has finished the message in this lane.
//
// An offer is a unit on LL lines. Its flag is 1 + the count of the lane's chunks before the
// message, which both ends know, so an offer of another message has a different flag.
#pragma once
#include "low_latency.cuh"
#include "staged_roles.cuh"
#include "zero_copy.cuh"

// Words of one lane and pair of ranks. The receiver writes `unit` in the sender's memory; the
// sender writes `placed` in the receiver's memory.
struct Offer {
  Line unit[2];
  // Count of the chunks sent before the first zero-copy one, with `IS_PLACED`; 0 if no chunk is
  // zero-copy. The receiver clears it; the sender sets it once it has seen the offer that the
  // receiver then made.
  Line placed;
  Line unused;
};
static_assert(sizeof(Offer) == 64, "");
#define IS_PLACED (1ull << 32)

// Offers of a lane, as both ends use them.
struct OfferedLane {
  const Common& common;
  const Handshake& handshake;
  const u32 lane;

  // Returns the words in the memory of rank `at` for its messages with rank `other`, which writes
  // them.
  DEVICE Offer* between(u32 at, u32 other) const {
    return (Offer*)(common.peer[at] + handshake.lines) + lane * WORLD + other;
  }

  // Counts, for the host, a kernel that moved data without staging. Sends and receives may run at
  // the same time, so each has a separate count.
  DEVICE void count(bool direct, u32 of) const {
    if (direct && lane == 0 && thread() == 0) {
      u32* counts = (u32*)(common.peer[RANK] + handshake.counts) + of;
      const u32 count = *counts + 1;
      *counts = count;
      store_relaxed(&common.report->direct[handshake.count + of], count);
    }
  }
};

// The offers that a sender polls: of the ranks in `handshake.give`, a bit each.
struct OffersToSender : OfferedLane {
  const Outgoing& out;
  bool direct = false;
  // Lines of the offer of the rank with this thread's number, as last polled, and the flag of the
  // message.
  Line a = {0, 0}, b = {0, 0};
  u32 flag = 0;

  DEVICE OffersToSender(
      const Common& common, const Handshake& handshake, u32 lane, const Outgoing& out)
      : OfferedLane{common, handshake, lane}, out(out) {}

  // Returns the ranks in `to` whose message does not end before chunk `step` of the lane, and which
  // may have made an offer.
  DEVICE u32 wanted(const SendSession& session, u32 to, u32 step, const u32 (&chunk)[WORLD]) const {
    u32 ranks = 0;
    for_each_peer([&](u32 r) {
      const bool may = (to & handshake.give) >> r & 1 && out.bytes[r] >= handshake.least;
      ranks |= may && session.start(step, chunk[r]) < out.bytes[r] ? 1u << r : 0;
    });
    return ranks;
  }

  // Polls for offers, thread r for the offer of rank r. `step` chunks of the message were sent
  // before.
  DEVICE void look(const SendSession& session, u32 to, u32 step) {
    const u32 r = thread();
    if (r < WORLD && ((to & handshake.give) >> r & 1)) {
      const Offer* offer = between(RANK, r);
      flag = session.of_thread(session.sent) - step + 1;
      a = load_relaxed(&offer->unit[0]);
      b = load_relaxed(&offer->unit[1]);
    }
  }

  // Stores the rest of the messages, from chunk `step`, for the ranks whose offers were seen.
  // Returns these ranks.
  DEVICE u32 put_rest(SendSession& session, u32 to, u32 step, const u32 (&chunk)[WORLD]) {
    // step 1: agree within the block on the offers that were seen; flag 0 would match cleared
    // memory. After a timeout the flag may match the offer of an earlier message.
    u32 found = 0;
    const bool seen = !session.wait.over && flag != 0 && have_arrived(a, b, flag);
    if (seen) {
      fence_system();
    }
    const u32 ranks = wanted(session, to, step, chunk);
    for_each_peer([&](u32 r) {
      if (ranks >> r & 1) {
        found |= sync_block_and(!(thread() == r && seen)) ? 0 : 1u << r;
      }
    });
    if (found == 0) {
      return 0;
    }
    // step 2: notify the receivers which chunks are zero-copy, and store them
    if (thread() < WORLD && (found >> thread() & 1)) {
      store_relaxed(
          &between(thread(), RANK)->placed, {IS_PLACED | session.of_thread(session.sent), 0});
    }
    for_each_peer([&](u32 r) {
      if (found >> r & 1) {
        const Offer* offer = between(RANK, r);
        const Line first = load_relaxed(&offer->unit[0]), second = load_relaxed(&offer->unit[1]);
        const Unit offered = data_of(first, second);
        // Never more than the peer's capacity, even if the ranks disagree. A receiver that has
        // timed out withdraws its offer.
        const bool stands = have_arrived(first, second, session.sent[r] - step + 1);
        const u64 bytes = stands ? smaller(out.bytes[r], second_of(offered)) : 0;
        const u32 chunks = session.chunks(out.bytes[r], chunk[r]);
        for (u32 next = step; next < chunks; ++next) {
          const u64 start = session.start(next, chunk[r]);
          put(out.from[r] + start, (u8*)(handshake.heap[r] + first_of(offered) + start),
              session.length(bytes, next, chunk[r]));
        }
        session.sent[r] += chunks - step - 1;
      }
    });
    // step 3: notify the receivers that all chunks have arrived
    sync_block();
    session.send(found);
    direct = true;
    return found;
  }

  // Copies `from`, at any alignment, to `to`, which is aligned to 16 bytes.
  DEVICE static void put(const u8* from, u8* to, u64 bytes) {
    const u32 units = (u32)(bytes / 16);
    const auto load = [&](u32 at) { return load_unit(from + (u64)at * 16, 16); };
    move_units(thread(), units, threads(), load, [&](u32 at, Unit v) { ((Unit*)to)[at] = v; });
    const u32 rest = (u32)(bytes % 16);
    if (rest != 0 && thread() == 0) {
      store_unit(to + (u64)units * 16, load_unit(from + (u64)units * 16, rest), rest);
    }
  }
};

// The offers that a receiver makes. It may make one to each rank whose bit is set in
// `handshake.take`.
struct OffersOfReceiver : OfferedLane {
  u8* const* to;
  const u64* bytes;
  bool direct = false;
  // True if this thread made an offer.
  bool made = false;

  DEVICE OffersOfReceiver(
      const Common& common, const Handshake& handshake, u32 lane, u8* const* to, const u64* bytes)
      : OfferedLane{common, handshake, lane}, to(to), bytes(bytes) {}

  // Offers the destination of each message that has a chunk in this lane; thread r offers to rank
  // r. A message without a chunk must not be offered: the lane's next message would have the same
  // flag and could be stored to this message's destination.
  DEVICE void make(const ReceiveSession& session, const u32 (&chunk)[WORLD]) {
    const u32 r = thread();
    made = !session.wait.over && r < WORLD && (handshake.take >> r & 1) &&
           session.start(0, session.of_thread(chunk)) < bytes[r];
    if (made) {
      store_relaxed(&between(RANK, r)->placed, {0, 0});
      fence_system();
      const u64 offset = (u64)to[r] - handshake.heap[RANK];
      store_lines(
          between(r, RANK)->unit, unit_of(offset, bytes[r]), session.of_thread(session.taken) + 1);
    }
  }

  // Returns the ranks in `sources` whose arrived chunk, and all later ones, are in place.
  DEVICE u32 in_place(const ReceiveSession& session, u32 sources) {
    u32 ranks = 0;
    for_each_peer([&](u32 r) {
      if ((sources & handshake.take) >> r & 1) {
        const u64 placed = load_relaxed(&between(RANK, r)->placed).first;
        ranks |= placed != 0 && (int)(session.taken[r] - (u32)placed) >= 0 ? 1u << r : 0;
      }
    });
    direct |= ranks != 0;
    return ranks;
  }

  // Withdraws the offers, all of whose messages have arrived.
  DEVICE void withdraw() const {
    const u32 r = thread();
    if (made) {
      store_lines(between(r, RANK)->unit, {0, 0, 0, 0}, 0);
    }
  }
};
