// Sends and receives of a rank: through staging, of long messages into symmetric memory as far as the receiver's offer comes in time. Only
// the two ends of a message know of it, so all that is counted is counted for each pair of ranks.
#include "offers.cuh"

struct TransfersArgs {
  Common common;
  Staging staging;
  Outgoing out;
  u8* to[MAX_WORLD];
  u64 bytes[MAX_WORLD];
  // Offers: `lines` is where they lie, `take` are those that this rank makes, `give` those that it looks for.
  Handshake handshake;
};
static_assert(sizeof(TransfersArgs) == 880, "");

// Blocks of the kernel: a lane's two roles side by side.
LANE_KERNEL(transfers, TransfersArgs) {
  after_predecessor();
  const auto [lane, role] = role_of(block(), 2);
  const ChunkOfTransfer chunk_of{{args.staging}};
  if (role == 0) {
    // step 1 (role 0): send each message
    SendSession session(args.common, args.staging, lane);
    OffersToSender offers(args.common, args.handshake, lane, args.out);
    send_pieces(session, args.out, ~0u, chunk_of, [](Unit v) { return v; }, offers, NoOwnMessage{});
    offers.count(offers.direct, 0);
  } else {
    // step 2 (role 1): receive each message
    ReceiveSession session(args.common, args.staging, lane);
    OffersOfReceiver offers(args.common, args.handshake, lane, args.to, args.bytes);
    receive_pieces(session, args.bytes, ~0u, chunk_of, CopyOut<ChunkOfTransfer>{args.to, args.bytes}, offers);
    offers.count(offers.direct, 1);
  }
}
