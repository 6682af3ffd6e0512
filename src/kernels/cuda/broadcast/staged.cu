// Broadcast of long messages through staging: the root sends each other rank a piece, which that
// rank forwards to the others. For a tensor of S bytes no rank sends more than S bytes. In a
// zero-copy call forwarded pieces are stored directly to tensors in symmetric memory.
#include "rsag_staged.cuh"

// Returns the table's entry of a rank that is known only at run time. Masks select it, because a
// variable index would place the table in memory.
DEVICE const Unit* entry_of(const Unit* const (&table)[WORLD], u32 rank) {
  u64 entry = 0;
  for_each_rank([&](u32 r) { entry |= (u64)table[r] & (0 - (u64)(r == rank)); });
  return (const Unit*)entry;
}

// Blocks of the kernel: the three roles of a lane are adjacent.
LANE_KERNEL(broadcast_staged, RsagStagedArgs) {
  after_predecessor();
  announce_arrival(args.common, args.scatter.arrivals);
  const auto [lane, role] = role_of(block(), 3);
  const u32 root = args.root;
  const u32 others = all_peers() & ~(1u << root);
  if (role == 0) {
    if (root == RANK) {
      // step 1 (role 0, root): send each other rank its piece, chunk by chunk
      scatter(args, lane, [](Unit v) { return v; });
    }
  } else if (role == 1) {
    // step 2 (role 1): forward each arrived chunk of this rank's piece to the other ranks, and
    // store it here
    const auto make = [&](const Unit* const(&slot)[WORLD], u32 unit, u64) {
      return entry_of(slot, root)[unit];
    };
#ifdef SYMM_ZERO_COPY
    // The root forwards nothing; it takes part without partners, so that it counts the same epochs
    // as the others.
    const u32 partners = root == RANK ? 0 : others;
    gather_zero_copy(args, lane, 1u << root, others, Partners{partners, partners}, make);
  } else if (args.handshake.take != 0) {
    // step 3 (role 2), zero-copy: nothing to do, since peers store their pieces to this rank's
    // tensor
#else
    if (root != RANK) {
      gather(args, lane, 1u << root, others, make);
    }
#endif
  } else if (root != RANK) {
    // step 3 (role 2): copy the other ranks' pieces from the slots to the result
    gather(args, lane);
  }
}
