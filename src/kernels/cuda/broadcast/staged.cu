// Broadcast of long messages: the root gives each other rank a piece, which passes it on to the others. No rank sends more than S.
// Where all tensors are symmetric memory, the others load their pieces from the root's and store them to each other's.
#include "direct.cuh"
#include "two_stage.cuh"

// The entry of a rank that only the kernel knows. By masks: an index that is no constant would put the table into memory.
template <typename Pointer>
DEVICE u64 entry_of(Pointer const (&table)[WORLD], u32 rank) {
  u64 entry = 0;
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    entry |= (u64)table[r] & (0 - (u64)(r == rank));
  }
  return entry;
}

DEVICE void through_staging(const TwoStageArgs& args) {
  const auto [lane, role] = place_of(block(), 3);
  const u32 root = args.root;
  const u32 others = ((1u << WORLD) - 1) & ~(1u << RANK) & ~(1u << root);
  if (role == 0) {
    if (root == RANK) {
      scatter(args, lane, [](Unit v) { return v; });
    }
  } else if (role == 1) {
    if (root != RANK) {
      spread(args, lane, 1u << root, others, [&](const Unit* const(&slot)[WORLD], u32 unit, u64) {
        return ((const Unit*)entry_of(slot, root))[unit];
      });
    }
  } else if (root != RANK) {
    gather(args, lane);
  }
}

#ifdef SYMM_GATED
DEVICE void through_gate(const TwoStageArgs& args) {
  const Gate& gate = args.gate;
  const u32 root = args.root;
  const Round round = begin_round(args.common, lines_of(gate));
  const auto tell = [&](u32 r) -> Line {
    return {told(gate, gate.give >> r & 1, args.from), told(gate, gate.take >> r & 1, args.to)};
  };
  Line said[WORLD];
  if (!open_gate(args.common, round, EVERYBODY, tell, said)) {
    return;
  }
  bool lacking = false;
  const u8* from[WORLD];
  u8* to[WORLD];
  u64 start[WORLD], length[WORLD];
  pieces_of(args, start, length);
#pragma unroll
  for (u32 r = 0; r < WORLD; ++r) {
    lacking |= (r == root ? said[r].first : said[r].second) == 0;
    from[r] = heard(gate, r, said[r].first);
    to[r] = heard(gate, r, said[r].second) + start[RANK];
  }
  if (lacking) {
    through_staging(args);
  } else {
    if (root != RANK) {
      const u32 others = ((1u << WORLD) - 1) & ~(1u << root);
      put_same((const u8*)entry_of(from, root) + start[RANK], to, others, length[RANK]);
    }
    count_direct(args.common, gate, block() == 0);
  }
  close_gate(args.common, gate, round, EVERYBODY);
}
#endif

// Blocks: a lane's three roles side by side.
LANE_KERNEL(broadcast_staged, TwoStageArgs) {
  after_predecessor();
#ifdef SYMM_GATED
  through_gate(args);
#else
  through_staging(args);
#endif
}
