// Exchange of messages between all ranks: every collective that moves bytes unchanged, and sends and receives.
//
// A short message travels on LL lines, a long one through staging; only its two ends know its length. How many blocks serve which
// protocol is the same on all ranks, so that every block finds its counterpart. A barrier is an epoch of LL lines without data.
// In a zero-copy call a long message goes straight into the receiver's tensor if that is symmetric memory.
#include "direct.cuh"
#include "zero_copy.cuh"
#include "pieces.cuh"

struct ExchangeArgs {
  Common common;
  LowLatency ll;
  Staging staging;
  // Blocks that serve LL lines; 0: no rank uses them in this call. Staging has 2 blocks a lane: a receiver, and a sender that also copies
  // what the rank keeps.
  u32 ll_blocks;
  // Length of the longest message that travels on LL lines; longer ones are staged.
  u64 short_bytes;
  Outgoing out;
  u8* to[MAX_WORLD];
  u64 bytes[MAX_WORLD];
  // Handshake of zero-copy calls; only its bits for what this rank takes count.
  Handshake handshake;
};
static_assert(sizeof(ExchangeArgs) == 920, "");

// Bytes of the rank's message to itself; 0 if it lies where it belongs already.
DEVICE u64 own_bytes(const ExchangeArgs& args) {
  const u8 *from = args.out.from[RANK], *to = args.to[RANK];
  return from != nullptr && to != nullptr && from != to ? args.out.bytes[RANK] : 0;
}

// Copies the rank's message to itself: all blocks of the grid stride over it together.
DEVICE void keep_own(const ExchangeArgs& args) {
  const u8* from = args.out.from[RANK];
  u8* to = args.to[RANK];
  const u64 bytes = own_bytes(args), units = units_of(bytes);
  const u64 first = stride_of_grid().first, step = stride_of_grid().step;
  for (u64 i = first; i < units; i += step * ALONE_AT_ONCE) {
    Unit v[ALONE_AT_ONCE];
    for_each_unit(i, units, step, [&](u32 u, u64 at) { v[u] = load_unit(from + at * 16, bytes - at * 16); });
    for_each_unit(i, units, step, [&](u32 u, u64 at) { store_unit(to + at * 16, v[u], bytes - at * 16); });
  }
}

// The rank's message to itself, of which a chunk goes along with each that a lane sends. Registers are scarce, so all is read and computed
// anew.
struct OwnMessage {
  const ExchangeArgs& args;

  // Its length and that of a chunk.
  DEVICE u64 bytes() const { return own_bytes(args); }
  DEVICE u32 chunk() const { return ChunkOfMessage{args.staging}(args.out.bytes[RANK]); }
  // The lane whose chunks `sender` copies. Where the messages differ the last lanes have the first chunks: the first blocks serve short
  // messages, too.
  DEVICE Stage lane(const Stage& sender) const {
    return Stage(args.common, args.staging, args.out.same ? sender.lane : args.staging.lanes - 1 - sender.lane);
  }
  // Number of the lane's chunks; units of chunk `step`, and where it starts.
  DEVICE u64 steps(const Stage& sender) const { return lane(sender).chunks(bytes(), chunk()); }
  DEVICE u32 units(const Stage& sender, u64 step) const { return (u32)units_of(lane(sender).length(bytes(), step, chunk())); }
  DEVICE u32 start(const Stage& sender, u64 step) const { return ChunkOfMessage::start(lane(sender).index(step), chunk()); }
  // Loads and stores unit `at` of the chunk that begins at `start`.
  DEVICE Unit load(u32 start, u32 at) const {
    const u64 offset = ChunkOfMessage::offset(start, at);
    return load_unit(args.out.from[RANK] + offset, args.out.bytes[RANK] - offset);
  }
  DEVICE void store(u32 start, u32 at, Unit v) const {
    const u64 offset = ChunkOfMessage::offset(start, at);
    store_unit(args.to[RANK] + offset, v, args.out.bytes[RANK] - offset);
  }
};

// Moves this block's share of every short message on LL lines.
DEVICE void exchange_short(const ExchangeArgs& args) {
  // step 1: find this block's share of each short message
  LowLatencySession session(args.common, args.ll);
  session.begin();
  u32 send[WORLD], take[WORLD];
  u32 longest = 1;
  for_each_peer([&](u32 r) {
    send[r] = args.out.bytes[r] <= args.short_bytes ? session.share(args.out.bytes[r]) : 0;
    take[r] = args.bytes[r] <= args.short_bytes ? session.share(args.bytes[r]) : 0;
    longest = send[r] > longest ? send[r] : longest;
    longest = take[r] > longest ? take[r] : longest;
  });
  // step 2: send each unit to its receiver; at least one line goes to every peer
  for (u32 i = thread(); i < longest; i += threads()) {
    const u64 offset = (session.first + i) * 16;
    Unit v[WORLD];
    for_each_peer([&](u32 r) {
      v[r] = {0, 0, 0, 0};
      if (i < send[r]) {
        v[r] = load_unit(args.out.from[r] + offset, args.out.bytes[r] - offset);
      }
    });
    for_each_peer([&](u32 r) {
      if (i < at_least_one(send[r])) {
        session.send(r, i, v[r]);
      }
    });
  }
  allow_successor();
  // step 3: copy the rank's own message, unless a staging block does
  if (args.staging.lanes == 0) {
    keep_own(args);
  }
  // step 4: receive each unit from its sender and store it
  for (u32 i = thread(); i < longest; i += threads()) {
    const u64 offset = (session.first + i) * 16;
    u32 sources = 0;
    for_each_peer([&](u32 r) { sources |= i < at_least_one(take[r]) ? 1u << r : 0; });
    Unit v[WORLD];
    session.receive(i, sources, v);
    for_each_peer([&](u32 r) {
      if (i < take[r]) {
        store_unit(args.to[r] + offset, v[r], args.bytes[r] - offset);
      }
    });
  }
  // step 5: end the epoch
  session.end();
}

#ifdef SYMM_ZERO_COPY
// Exchanges handshake words and moves what goes straight from tensor to tensor, which is no longer in `to` and `from` then. Makes `lanes`
// 0 if nothing is left for staging. Returns false if some rank did not come: nothing was moved then.
DEVICE bool put_direct(const ExchangeArgs& args, HandshakeSession& session, u32& to, u32& from, u32& lanes) {
  const Handshake& handshake = args.handshake;
  // step 1: tell each peer how much of its message has room, and where it goes
  const auto word_for = [&](u32 r) -> Line { return {args.bytes[r], session.word(handshake.take >> r & 1, args.to[r])}; };
  Line words[WORLD];
  if (!session.exchange(word_for, words)) {
    return false;
  }
  // step 2: divide the messages into those put directly and those left for staging
  u32 put = 0;
  bool staged = false, direct = false;
  u8* place[WORLD];
  u64 bytes[WORLD];
  for_each_peer([&](u32 r) {
    const bool out = to >> r & 1, in = from >> r & 1;
    const bool there = words[r].second != 0, here = handshake.take >> r & 1;
    put |= out && there ? 1u << r : 0;
    staged |= (out && !there && args.out.bytes[r] > 0) || (in && !here && args.bytes[r] > 0);
    direct |= (out && there) || (in && here);
    place[r] = session.tensor(r, words[r].second);
    // Never more than the peer has room for, even if the ranks disagree.
    bytes[r] = smaller(args.out.bytes[r], words[r].first);
  });
  // The rank's own message goes along with the others where nothing is staged: it hides behind their stores.
  u8* const own = args.to[RANK];
  const bool along = !staged && own != nullptr && (u64)own % 16 == 0 && own != args.out.from[RANK];
  place[RANK] = along ? own : nullptr;
  bytes[RANK] = along && args.out.from[RANK] != nullptr ? args.out.bytes[RANK] : 0;
  const u32 targets = bytes[RANK] > 0 ? put | 1u << RANK : put;
  // step 3: put the direct messages
  if (args.out.same) {
    u64 length = args.out.bytes[(RANK + 1) % WORLD];
    for_each_peer([&](u32 r) { length = put >> r & 1 ? smaller(length, bytes[r]) : length; });
    put_same(args.out.from[(RANK + 1) % WORLD], place, targets, length);
  } else {
    put_each(args.out.from, place, targets, bytes);
  }
  // step 4: count the call as direct, copy the rank's own message if it did not go along
  if (direct) {
    session.count_direct(block() == 0);
  }
  if (!staged) {
    if (targets == put) {
      keep_own(args);
    }
    lanes = 0;
  }
  to &= ~put;
  from &= ~handshake.take;
  return true;
}

// Blocks of the kernel: a lane's two roles side by side. The first `ll_blocks` serve LL lines too, after their role.
LANE_KERNEL(exchange, ExchangeArgs) {
#else
KERNEL(exchange, ExchangeArgs) {
#endif
  after_predecessor();
  // step 1: find the peers whose messages are long
  u32 lanes = args.staging.lanes;
  u32 to = 0, from = 0;
  for_each_peer([&](u32 r) {
    to |= args.ll_blocks == 0 || args.out.bytes[r] > args.short_bytes ? 1u << r : 0;
    from |= args.ll_blocks == 0 || args.bytes[r] > args.short_bytes ? 1u << r : 0;
  });
#ifdef SYMM_ZERO_COPY
  // step 2: begin the handshake with the partners and put what goes direct
  // Partners are the ends of a message that may go direct. Both know its length, so neither waits for a message that is staged anyhow.
  Partners partners{0, 0};
  for_each_peer([&](u32 r) {
    partners.to |= (from >> r & 1) && args.bytes[r] >= args.handshake.least ? 1u << r : 0;
    partners.from |= (to >> r & 1) && args.out.bytes[r] >= args.handshake.least ? 1u << r : 0;
  });
  const bool meets = (partners.to | partners.from) != 0;
  HandshakeSession session(args.common, args.handshake, partners);
  session.begin();
  if (meets && !put_direct(args, session, to, from, lanes)) {
    return;
  }
#endif
  // step 3: stage the other long messages: role 0 sends and copies the rank's own message, role 1 receives
  const auto [lane, role] = role_of(block(), 2);
  const ChunkOfMessage chunk_of{args.staging};
  if (lane >= lanes) {
    // This block serves LL lines alone.
  } else if (role == 0) {
    SendSession sender(args.common, args.staging, lane);
    NoOffers none;
    send_pieces(sender, args.out, to, chunk_of, [](Unit v) { return v; }, none, OwnMessage{args});
  } else {
    ReceiveSession receiver(args.common, args.staging, lane);
    receive_pieces(receiver, args.bytes, from, chunk_of, CopyOut<ChunkOfMessage>{args.to, args.bytes});
  }
  // step 4: exchange the short messages
  if (block() < args.ll_blocks) {
    exchange_short(args);
  }
#ifdef SYMM_ZERO_COPY
  // step 5: end the handshake, also without partners: no rank knows which others have partners, and all must count the same epochs
  session.end();
#endif
}
