// Two roles of staged exchanges and reductions: one sends message `d` to rank `d`, the other
// receives the messages of all ranks.
#pragma once
#include "staging.cuh"

// Messages of this rank: one for each rank.
struct Outgoing {
  const u8* from[MAX_WORLD];
  u64 bytes[MAX_WORLD];
  // Not 0 if all messages are the same bytes: each unit is read once and written to every peer.
  u32 same;
};

// No offers (recv_offers.cuh): every chunk is staged.
struct NoOffers {
  DEVICE void look(const SendSession&, u32, u32) const {}
  DEVICE u32 put_rest(SendSession&, u32, u32, const u32 (&)[WORLD]) const { return 0; }
  DEVICE void make(const ReceiveSession&, const u32 (&)[WORLD]) const {}
  DEVICE u32 in_place(const ReceiveSession&, u32) const { return 0; }
  DEVICE void withdraw() const {}
};

// No message of the rank to itself.
struct NoOwnMessage {
  DEVICE u32 steps(const Stage&) const { return 0; }
  DEVICE u32 units(const Stage&, u32) const { return 0; }
  DEVICE u32 start(const Stage&, u32) const { return 0; }
  DEVICE Unit load(u32, u32) const { return {0, 0, 0, 0}; }
  DEVICE void store(u32, u32, Unit) const {}
};

// Returns how many chunks of a message this lane carries: the maximum over the messages of the
// ranks in `ranks` (a bit each).
DEVICE u32 steps_of(const Stage& stage, const u64* bytes, const u32 (&chunk)[WORLD], u32 ranks) {
  u32 steps = 0;
  for_each_peer([&](u32 r) {
    steps = ranks >> r & 1 ? larger(steps, stage.chunks(bytes[r], chunk[r])) : steps;
  });
  return steps;
}

// Sends the messages to the ranks in `to` in chunks. `lift` is applied to each unit. The rest of a
// message with an offer in `offers` is stored directly. Each step also copies a chunk of `own`, the
// rank's message to itself, which must be empty if chunks are moved one by one.
template <typename ChunkOf, typename Lift, typename Offers, typename Own>
DEVICE void send_pieces(
    SendSession& session, const Outgoing& out, u32 to, ChunkOf chunk_of, Lift lift, Offers& offers,
    Own own) {
  // step 1: start where the last call ended, find the number of chunks
  session.begin();
  u32 chunk[WORLD];
  for_each_peer([&](u32 r) { chunk[r] = chunk_of(out.bytes[r]); });
  const bool any = steps_of(session, out.bytes, chunk, to) > 0;
  offers.look(session, to, 0);
  to &= ~offers.put_rest(session, to, 0, chunk);
  u32 steps = larger(own.steps(session), steps_of(session, out.bytes, chunk, to));
  // step 2: send chunk after chunk
  for (u32 step = 0; step < steps; ++step) {
    u32 peers = 0;
    const u32 kept = own.units(session, step);
    u32 longest = kept;
    u32 units[WORLD];
    typename ChunkOf::Start start[WORLD];
    for_each_peer([&](u32 r) {
      // step 2a: find each peer's slot, wait until the peer has read the slot's previous chunk
      units[r] = to >> r & 1 ? (u32)units_of(session.length(out.bytes[r], step, chunk[r])) : 0;
      start[r] = ChunkOf::start(session.index(step), chunk[r]);
      longest = larger(units[r], longest);
      if (units[r] > 0) {
        peers |= 1u << r;
        session.await_credit(r);
      }
    });
    start[RANK] = own.start(session, step);
    offers.look(session, to, step);
    // step 2b: write the units to the slots, whose addresses are recomputed because registers are
    // scarce. A thread that timed out writes none: a slot may have a chunk that its peer has not
    // read.
    const u32 first = session.wait.over ? longest : thread();
    if (out.same) {
      for (u32 i = first; i < longest; i += threads() * ALONE_AT_ONCE) {
        Unit v[ALONE_AT_ONCE];
        for_each_unit(i, longest, threads(), [&](u32 u, u32 at) {
          const u64 offset = ChunkOf::offset(start[(RANK + 1) % WORLD], at);
          v[u] = lift(load_unit(
              out.from[(RANK + 1) % WORLD] + offset, out.bytes[(RANK + 1) % WORLD] - offset));
        });
        for_each_peer([&](u32 r) {
          for_each_unit(i, units[r], threads(), [&](u32 u, u32 at) { session.slot(r)[at] = v[u]; });
        });
        for_each_unit(i, kept, threads(), [&](u32 u, u32 at) { own.store(start[RANK], at, v[u]); });
      }
    } else if (ChunkOf::ONE_BY_ONE) {
      for_each_peer([&](u32 r) {
        const auto load = [&](u32 at) {
          const u64 offset = ChunkOf::offset(start[r], at);
          return load_unit(out.from[r] + offset, out.bytes[r] - offset);
        };
        move_units(first, units[r], threads(), load, [&](u32 at, Unit v) {
          session.slot(r)[at] = lift(v);
        });
      });
    } else {
      // With many peers, which need registers, the rank's own unit is loaded only when it is
      // stored.
      constexpr bool LOAD_EARLY = AT_ONCE > 1;
      for (u32 i = first; i < longest; i += threads() * AT_ONCE) {
        Unit v[AT_ONCE][WORLD];
#pragma unroll
        for (u32 u = 0; u < AT_ONCE; ++u) {
          const u32 at = i + u * threads();
          if (LOAD_EARLY && at < kept) {
            v[u][RANK] = own.load(start[RANK], at);
          }
          for_each_peer([&](u32 r) {
            const u64 offset = ChunkOf::offset(start[r], at);
            if (at < units[r]) {
              v[u][r] = load_unit(out.from[r] + offset, out.bytes[r] - offset);
            }
          });
        }
#pragma unroll
        for (u32 u = 0; u < AT_ONCE; ++u) {
          const u32 at = i + u * threads();
          for_each_peer([&](u32 r) {
            if (at < units[r]) {
              session.slot(r)[at] = lift(v[u][r]);
            }
          });
          if (at < kept) {
            own.store(start[RANK], at, LOAD_EARLY ? v[u][RANK] : own.load(start[RANK], at));
          }
        }
      }
    }
    // step 2c: notify the peers that the chunk has arrived, unless a thread timed out
    if (peers != 0) {
      if (!sync_block_and(!session.wait.over)) {
        break;
      }
      session.send(peers);
    }
    // step 2d: if offers were seen, store the rest of their messages directly
    const u32 done = offers.put_rest(session, to, step + 1, chunk);
    if (done != 0) {
      to &= ~done;
      steps = larger(own.steps(session), steps_of(session, out.bytes, chunk, to));
    }
  }
  // step 3: save the counts for the next call. A call that sent nothing must not save them, because
  // a kernel with other sends may run at the same time.
  if (any) {
    session.end();
  }
}

template <typename ChunkOf, typename Lift>
DEVICE void send_pieces(
    SendSession& session, const Outgoing& out, u32 to, ChunkOf chunk_of, Lift lift) {
  NoOffers none;
  send_pieces(session, out, to, chunk_of, lift, none, NoOwnMessage{});
}

// Receives a message of `bytes[r]` from each rank r in `from`, in chunks.
// `take(start, units, slot)` reads one chunk of each message: the chunk of rank r has `units[r]`
// units at `slot[r]`, and starts at `start[r]` of the message (`ChunkOf::Start`). Bytes that
// arrived through `offers` are already in place.
template <typename ChunkOf, typename Take, typename Offers>
DEVICE void receive_pieces(
    ReceiveSession& session, const u64* bytes, u32 from, ChunkOf chunk_of, Take take,
    Offers& offers) {
  // step 1: start where the last call ended, find the number of chunks
  session.begin();
  u32 chunk[WORLD];
  for_each_peer([&](u32 r) { chunk[r] = chunk_of(bytes[r]); });
  u32 steps = steps_of(session, bytes, chunk, from);
  const bool any = steps > 0;
  if (any) {
    offers.make(session, chunk);
  }
  // step 2: receive chunk after chunk
  for (u32 step = 0; step < steps; ++step) {
    u32 peers = 0;
    u32 units[WORLD];
    typename ChunkOf::Start start[WORLD];
    const Unit* slot[WORLD];
    for_each_peer([&](u32 r) {
      units[r] = from >> r & 1 ? (u32)units_of(session.length(bytes[r], step, chunk[r])) : 0;
      start[r] = ChunkOf::start(session.index(step), chunk[r]);
      slot[r] = session.slot(r);
      peers |= units[r] > 0 ? 1u << r : 0;
    });
    units[RANK] = 0;
    start[RANK] = 0;
    slot[RANK] = nullptr;
    // step 2a: wait until every peer's chunk has arrived, and read it
    if (!session.receive(peers)) {
      break;
    }
    const u32 placed = offers.in_place(session, peers);
    if (placed != 0) {
      for_each_peer([&](u32 r) {
        if (placed >> r & 1) {
          units[r] = 0;
          session.taken[r] += session.chunks(bytes[r], chunk[r]) - step - 1;
        }
      });
      from &= ~placed;
      steps = larger(steps_of(session, bytes, chunk, from), step + 1);
    }
    take(start, units, slot);
    // step 2b: return the slots to their senders
    sync_block();
    session.release(peers);
  }
  // step 3: save the counts for the next call
  if (any) {
    offers.withdraw();
    session.end();
  }
}

template <typename ChunkOf, typename Take>
DEVICE void receive_pieces(
    ReceiveSession& session, const u64* bytes, u32 from, ChunkOf chunk_of, Take take) {
  NoOffers none;
  receive_pieces(session, bytes, from, chunk_of, take, none);
}

// Reader for `receive_pieces` that copies each message to a separate destination.
template <typename ChunkOf>
struct CopyOut {
  u8* const* to;
  const u64* bytes;

  DEVICE void operator()(
      const typename ChunkOf::Start (&start)[WORLD], const u32 (&units)[WORLD],
      const Unit* const (&slot)[WORLD]) const {
    if (ChunkOf::ONE_BY_ONE) {
      for_each_peer([&](u32 r) {
        const auto store = [&](u32 at, Unit v) {
          const u64 offset = ChunkOf::offset(start[r], at);
          store_unit(to[r] + offset, v, bytes[r] - offset);
        };
        move_units(thread(), units[r], threads(), [&](u32 at) { return slot[r][at]; }, store);
      });
      return;
    }
    u32 longest = 0;
    for_each_rank([&](u32 r) { longest = larger(units[r], longest); });
    for (u32 i = thread(); i < longest; i += threads() * AT_ONCE) {
      Unit v[AT_ONCE][WORLD];
#pragma unroll
      for (u32 u = 0; u < AT_ONCE; ++u) {
        for_each_peer([&](u32 r) {
          if (i + u * threads() < units[r]) {
            v[u][r] = slot[r][i + u * threads()];
          }
        });
      }
#pragma unroll
      for (u32 u = 0; u < AT_ONCE; ++u) {
        for_each_peer([&](u32 r) {
          const u64 offset = ChunkOf::offset(start[r], i + u * threads());
          if (i + u * threads() < units[r]) {
            store_unit(to[r] + offset, v[u][r], bytes[r] - offset);
          }
        });
      }
    }
  }
};
