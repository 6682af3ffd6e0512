// Exchange of messages of any length between all ranks.
//
// A short message uses LL lines, a long one staging; only its two ends know its length. The number
// of blocks of each protocol is the same on all ranks, so that every block has its counterpart. In
// a zero-copy call a long message is stored directly to the receiver's tensor if that is in
// symmetric memory.
#include "exchange.cuh"
#include "zero_copy.cuh"

// The rank's message to itself. The lane copies a chunk of it along with each chunk that it sends.
// Registers are scarce, so each function loads and computes its values again.
struct OwnMessage {
  const ExchangeArgs& args;

  // Length of the message, and length of a chunk.
  DEVICE u64 bytes() const { return own_bytes(args); }
  DEVICE u32 chunk() const { return ChunkOfMessage{args.staging}(args.out.bytes[RANK]); }
  // Returns the lane whose chunks `sender` copies. If messages differ, the last lanes have the
  // first chunks, because the first blocks also send short messages.
  DEVICE Stage lane(const Stage& sender) const {
    return Stage(
        args.common, args.staging,
        args.out.same ? sender.lane : args.staging.lanes - 1 - sender.lane);
  }
  // Number of the lane's chunks; number of units of chunk `step`, and where it starts.
  DEVICE u32 steps(const Stage& sender) const { return lane(sender).chunks(bytes(), chunk()); }
  DEVICE u32 units(const Stage& sender, u32 step) const {
    return (u32)units_of(lane(sender).length(bytes(), step, chunk()));
  }
  DEVICE u32 start(const Stage& sender, u32 step) const {
    return ChunkOfMessage::start(lane(sender).index(step), chunk());
  }
  // Load and store unit `at` of the chunk that starts at `start`.
  DEVICE Unit load(u32 start, u32 at) const {
    const u64 offset = ChunkOfMessage::offset(start, at);
    return load_unit(args.out.from[RANK] + offset, args.out.bytes[RANK] - offset);
  }
  DEVICE void store(u32 start, u32 at, Unit v) const {
    const u64 offset = ChunkOfMessage::offset(start, at);
    store_unit(args.to[RANK] + offset, v, args.out.bytes[RANK] - offset);
  }
};

#ifdef SYMM_ZERO_COPY
// Exchanges handshake words, stores the zero-copy messages, and removes their ranks from the masks
// `to` and `from`. Sets `keeps` to false if it has also copied the rank's own message. Returns
// false if a rank did not arrive; then nothing was moved.
DEVICE bool put_direct(
    const ExchangeArgs& args, HandshakeSession& session, u32& to, u32& from, bool& keeps) {
  const Handshake& handshake = args.handshake;
  // step 1: send each peer the capacity and the address for its message
  const auto word_for = [&](u32 r) -> Line {
    return {args.bytes[r], session.word(handshake.take >> r & 1, args.to[r])};
  };
  Line words[WORLD];
  if (!session.exchange(word_for, words)) {
    return false;
  }
  // step 2: divide the messages into zero-copy and staged ones
  u32 put = 0;
  bool direct = false;
  u8* place[WORLD];
  u64 bytes[WORLD];
  for_each_peer([&](u32 r) {
    const bool out = to >> r & 1, in = from >> r & 1;
    const bool there = words[r].second != 0, here = handshake.take >> r & 1;
    put |= out && there ? 1u << r : 0;
    direct |= (out && there) || (in && here);
    place[r] = session.tensor(r, words[r].second);
    // Never more than the peer's capacity, even if the ranks disagree.
    bytes[r] = smaller(args.out.bytes[r], words[r].first);
  });
  to &= ~put;
  from &= ~handshake.take;
  // If nothing is staged, copy the rank's own message together with the messages to peers, whose
  // stores take longer.
  u8* const own = args.to[RANK];
  const bool along =
      (to | from) == 0 && own != nullptr && (u64)own % 16 == 0 && own != args.out.from[RANK];
  place[RANK] = along ? own : nullptr;
  bytes[RANK] = along && args.out.from[RANK] != nullptr ? args.out.bytes[RANK] : 0;
  const u32 targets = bytes[RANK] > 0 ? put | 1u << RANK : put;
  // step 3: store the zero-copy messages
  if (args.out.same) {
    u64 length = args.out.bytes[(RANK + 1) % WORLD];
    for_each_peer([&](u32 r) { length = put >> r & 1 ? smaller(length, bytes[r]) : length; });
    put_same(args.out.from[(RANK + 1) % WORLD], place, targets, length);
  } else {
    put_each(args.out.from, place, targets, bytes);
  }
  keeps = targets == put;
  // step 4: count the call as zero-copy
  if (direct) {
    session.count_direct(block() == 0);
  }
  return true;
}
#endif

// Blocks of the kernel: the two roles of a lane are adjacent. The first `ll_blocks` blocks also
// carry the short messages: they send them before the work of their role, and receive them after
// it.
LANE_KERNEL(exchange, ExchangeArgs) {
  after_predecessor();
  announce_arrival(args.common, args.staging.arrivals);
  const bool serves_short = block() < args.ll_blocks;
  // step 1: send the short messages, so that their lines arrive while the long ones are moved
  if (serves_short) {
    LowLatencySession lines(args.common, args.ll);
    lines.begin();
    send_short(args, lines);
  }
  // step 2: find the peers with long messages
  bool keeps = true;
  u32 to = 0, from = 0;
  for_each_peer([&](u32 r) {
    to |= args.out.bytes[r] > args.short_bytes ? 1u << r : 0;
    from |= args.bytes[r] > args.short_bytes ? 1u << r : 0;
  });
#ifdef SYMM_ZERO_COPY
  // step 3: start the handshake with the partners and store the zero-copy messages. Partners are
  // the ends of a message that may be zero-copy. Both know its length, so neither waits for a
  // message that is staged anyway.
  Partners partners{0, 0};
  for_each_peer([&](u32 r) {
    partners.to |= (from >> r & 1) && args.bytes[r] >= args.handshake.least ? 1u << r : 0;
    partners.from |= (to >> r & 1) && args.out.bytes[r] >= args.handshake.least ? 1u << r : 0;
  });
  const bool meets = (partners.to | partners.from) != 0;
  HandshakeSession session(args.common, args.handshake, partners);
  session.begin();
  if (meets && !put_direct(args, session, to, from, keeps)) {
    return;
  }
#endif
  // step 4: stage the other long messages: role 0 sends and copies the rank's own message, role 1
  // receives
  const bool staged = (to | from) != 0;
  const auto [lane, role] = role_of(block(), 2);
  if (staged && lane < args.staging.lanes) {
    const ChunkOfMessage chunk_of{args.staging};
    if (role == 0) {
      SendSession sender(args.common, args.staging, lane);
      NoOffers none;
      send_pieces(sender, args.out, to, chunk_of, [](Unit v) { return v; }, none, OwnMessage{args});
    } else {
      ReceiveSession receiver(args.common, args.staging, lane);
      receive_pieces(
          receiver, args.bytes, from, chunk_of, CopyOut<ChunkOfMessage>{args.to, args.bytes});
    }
  }
  // step 5: if nothing is staged, all blocks copy the rank's own message
  if (keeps && !staged) {
    keep_own(args);
  }
  // step 6: receive the short messages in a new session, because the session of step 1 would occupy
  // scarce registers in between
  if (serves_short) {
    LowLatencySession lines(args.common, args.ll);
    lines.begin();
    allow_successor();
    receive_short(args, lines);
    lines.end();
  }
#ifdef SYMM_ZERO_COPY
  // step 7: end the handshake, even without partners: no rank knows which others have partners, and
  // all must count the same epochs
  session.end();
#endif
}
