// Sends and receives of a rank, through staging. The rest of a long message is stored directly to
// symmetric memory once the sender sees the receiver's offer. Only the two ends know of a message,
// so everything is counted per pair of ranks.
#include "recv_offers.cuh"

struct TransfersArgs {
  Common common;
  Staging staging;
  Outgoing out;
  u8* to[MAX_WORLD];
  u64 bytes[MAX_WORLD];
  // Offers: `lines` is their offset, `take` has a bit for each offer that this rank makes, `give`
  // for each that it polls.
  Handshake handshake;
  // Offsets in the channel of the `MessageWords` of messages that this rank sends, and of those
  // that it receives.
  u32 send_words, receive_words;
  // The ranks, a bit each, to whose ends of a message sent or received this kernel announces this
  // rank.
  u32 announce_sends, announce_receives;
};
static_assert(sizeof(TransfersArgs) == 896, "");

// Blocks of the kernel: the two roles of a lane are adjacent.
LANE_KERNEL(transfers, TransfersArgs) {
  after_predecessor();
  const auto [lane, role] = role_of(block(), 2);
  const ChunkOfTransfer chunk_of{{args.staging}};
  if (role == 0) {
    // step 1 (role 0): send each message
    if (lane == 0) {
      announce_messages(args.common, args.send_words, args.receive_words, args.announce_sends);
    }
    SendSession session(args.common, args.staging, lane);
    OffersToSender offers(args.common, args.handshake, lane, args.out);
    send_pieces(session, args.out, ~0u, chunk_of, [](Unit v) { return v; }, offers, NoOwnMessage{});
    offers.count(offers.direct, 0);
  } else {
    // step 2 (role 1): receive each message
    if (lane == 0) {
      announce_messages(args.common, args.receive_words, args.send_words, args.announce_receives);
    }
    ReceiveSession session(args.common, args.staging, lane);
    OffersOfReceiver offers(args.common, args.handshake, lane, args.to, args.bytes);
    receive_pieces(
        session, args.bytes, ~0u, chunk_of, CopyOut<ChunkOfTransfer>{args.to, args.bytes}, offers);
    offers.count(offers.direct, 1);
  }
}
