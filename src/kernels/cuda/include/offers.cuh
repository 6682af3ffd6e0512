// Offers of receivers: what is left of a long message goes straight into the receiver's tensor, if that is symmetric memory.
//
// Nobody but the two ends knows of a send, and neither waits for the other: the sender begins through staging, looks between two chunks
// whether there is an offer, and goes direct from there on. Each lane does so for itself. One lane takes 4 steps:
//   1. The receiver clears `placed` and offers: where the message goes in its heap, and how many bytes.
//   2. The sender sees it after some chunks. It tells by `placed` how many, stores what is left of its lane's chunks where they belong,
//      fences and raises `arrived` by all of them.
//   3. The receiver waits for `arrived` as it does without an offer. What arrives after the chunks before `placed` lies in its place.
//   4. The receiver withdraws the offer: the sender has ended the message in this lane.
// An offer is a unit on LL lines. Its flag is the count of the lane's chunks before the message, which both ends know, and 1: an offer of
// another message has another flag.
#pragma once
#include "low_latency.cuh"
#include "pieces.cuh"
#include "zero_copy.cuh"

// Words of one lane and pair of ranks. `unit` is at the sender and written by the receiver, `placed` is at the receiver.
struct Offer {
  Line unit[2];
  // Count of the chunks that were sent before the first that goes direct, with `IS_PLACED`; 0: none goes direct. The receiver clears it,
  // the sender sets it once it has seen the offer that followed.
  Line placed;
  Line unused;
};
static_assert(sizeof(Offer) == 64, "");
#define IS_PLACED (1ull << 32)

// Offers of a lane, as both ends see them.
struct OfferedLane {
  const Common& common;
  const Handshake& handshake;
  const u32 lane;

  // Offer between ranks `at`, whose memory it lies in, and `other`.
  DEVICE Offer* between(u32 at, u32 other) const { return (Offer*)(common.peer[at] + handshake.lines) + lane * WORLD + other; }

  // Counts, for the host to see, a kernel that moved something without staging. Sends and receives may run at the same time: each have a
  // count of their own.
  DEVICE void count(bool direct, u32 of) const {
    if (direct && lane == 0 && thread() == 0) {
      u32* counts = (u32*)(common.peer[RANK] + handshake.counts) + of;
      const u32 count = *counts + 1;
      *counts = count;
      store_relaxed(&common.report->direct[handshake.count + of], count);
    }
  }
};

// Offers that a sender looks for: those of the ranks in `handshake.give`, a bit each.
struct OffersToSender : OfferedLane {
  const Outgoing& out;
  bool direct = false;
  // Lines of the offer of the rank of this thread's number, as they were when it looked, and the flag of the message.
  Line a = {0, 0}, b = {0, 0};
  u32 flag = 0;

  DEVICE OffersToSender(const Common& common, const Handshake& handshake, u32 lane, const Outgoing& out)
      : OfferedLane{common, handshake, lane}, out(out) {}

  // Ranks in `to` for which chunk `step` of the lane is not the end of the message, and which may have made an offer.
  DEVICE u32 wanted(const SendSession& session, u32 to, u32 step, const u32 (&chunk)[WORLD]) const {
    u32 ranks = 0;
    for_each_peer([&](u32 r) {
      const bool may = (to & handshake.give) >> r & 1 && out.bytes[r] >= handshake.least;
      ranks |= may && session.start(step, chunk[r]) < out.bytes[r] ? 1u << r : 0;
    });
    return ranks;
  }

  // Looks for offers: thread r for that of rank r. `step` chunks of the message were sent before.
  DEVICE void look(const SendSession& session, u32 to, u32 step) {
    const u32 r = thread();
    if (r < WORLD && ((to & handshake.give) >> r & 1)) {
      const Offer* offer = between(RANK, r);
      flag = session.of_thread(session.sent) - step + 1;
      a = load_relaxed(&offer->unit[0]);
      b = load_relaxed(&offer->unit[1]);
    }
  }

  // Stores all of the messages that is left from chunk `step` on, for the ranks whose offer was seen. Returns these ranks.
  DEVICE u32 put_rest(SendSession& session, u32 to, u32 step, const u32 (&chunk)[WORLD]) {
    // step 1: agree within the block on the offers that were seen; flag 0 would be that of cleared memory
    u32 found = 0;
    const bool seen = flag != 0 && have_arrived(a, b, flag);
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
    // step 2: tell the receivers which chunks go direct, store them
    if (thread() < WORLD && (found >> thread() & 1)) {
      store_relaxed(&between(thread(), RANK)->placed, {IS_PLACED | session.of_thread(session.sent), 0});
    }
    for_each_peer([&](u32 r) {
      if (found >> r & 1) {
        const Offer* offer = between(RANK, r);
        const Unit offered = data_of(load_relaxed(&offer->unit[0]), load_relaxed(&offer->unit[1]));
        // Never more than the peer has room for, even if the ranks disagree.
        const u64 bytes = smaller(out.bytes[r], second_of(offered));
        const u32 chunks = session.chunks(out.bytes[r], chunk[r]);
        for (u32 next = step; next < chunks; ++next) {
          const u64 start = session.start(next, chunk[r]);
          put(out.from[r] + start, (u8*)(handshake.heap[r] + first_of(offered) + start), session.length(bytes, next, chunk[r]));
        }
        session.sent[r] += chunks - step - 1;
      }
    });
    // step 3: tell the receivers that all is there
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

// Offers that a receiver makes: to the ranks in `handshake.take`, a bit each.
struct OffersOfReceiver : OfferedLane {
  u8* const* to;
  const u64* bytes;
  bool direct = false;
  // This thread made an offer.
  bool made = false;

  DEVICE OffersOfReceiver(const Common& common, const Handshake& handshake, u32 lane, u8* const* to, const u64* bytes)
      : OfferedLane{common, handshake, lane}, to(to), bytes(bytes) {}

  // Offers each message of which the lane has a chunk its place: thread r to rank r. Without one the lane's next message, which would have
  // the same flag, could be put where this one belongs.
  DEVICE void make(const ReceiveSession& session, const u32 (&chunk)[WORLD]) {
    const u32 r = thread();
    made = r < WORLD && (handshake.take >> r & 1) && session.start(0, session.of_thread(chunk)) < bytes[r];
    if (made) {
      store_relaxed(&between(RANK, r)->placed, {0, 0});
      fence_system();
      const u64 offset = (u64)to[r] - handshake.heap[RANK];
      store_lines(between(r, RANK)->unit, unit_of(offset, bytes[r]), session.of_thread(session.taken) + 1);
    }
  }

  // Ranks in `sources` whose chunk that has arrived is in its place, and so is all that follows.
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

  // Withdraws the offers, all of whose messages are there.
  DEVICE void withdraw() const {
    const u32 r = thread();
    if (made) {
      store_lines(between(r, RANK)->unit, {0, 0, 0, 0}, 0);
    }
  }
};
