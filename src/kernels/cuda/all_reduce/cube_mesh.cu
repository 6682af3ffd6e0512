// All-reduce along the edges of a hybrid cube mesh: every rank has links to the three others of its quad and to one, its relay, in the
// other quad. Nothing, neither data nor flags, is written to anybody else. Messages short enough for flags in the data.
//   1. Each rank sends its units to its quad, and adds up the quad's four in rank order, rounding once.
//   2. Each rank sends this partial to its relay, and adds the two partials, that of the quad with rank 0 first.
// Sent per rank: 4 S, and as much again of flags. Two trips.
//
// All four of a quad compute the same partial, and all eight combine the same two in the same order: the same bits everywhere. They
// are not those of a sum in rank order: each quad's is rounded.
//
// Why two buffers suffice (low_latency.cuh): a block that ends a round knows that the same block of all ranks has begun it. It heard from
// its quad itself. Its relay's partial was sent by a thread that had heard from all of the relay's quad, who send nothing of a round before
// they begin it. And every block sends at least one unit in either step of every round, data or not. So these rounds may alternate with
// those of any other kernel on the same lines, in which all ranks hear from all: both count the same epochs.
// The two steps share a round: what a rank sends lies at its own index, and it sends to its quad in the first step only, to its relay in
// the second only, so no line is written twice.
#include "low_latency.cuh"
#include "types.cuh"

struct CubeMeshArgs {
  Common common;
  LowLatency ll;
  const u8* from;
  u8* to;
  u64 bytes;
  double factor;
  // The three others of this rank's quad, ascending.
  u32 quad[3];
  u32 relay;
  // Not 0: rank 0 is in this rank's quad.
  u32 first_quad;
};
static_assert(sizeof(CubeMeshArgs) == 240, "");

// What the quad adds up to, `own` in its place among the ranks.
DEVICE Unit sum_of_quad(const CubeMeshArgs& args, Unit own, const Unit (&mate)[3]) {
  Sum sum;
  begin(sum, RANK < args.quad[0] ? own : mate[0]);
#pragma unroll
  for (u32 k = 1; k < 3; ++k) {
    // role k is this rank's if k mates come before it, and the mates after it have moved up by one.
    combine(sum, RANK < args.quad[k - 1] ? mate[k - 1] : RANK < args.quad[k] ? own : mate[k]);
  }
  combine(sum, RANK < args.quad[2] ? mate[2] : own);
  return partial(sum);
}

KERNEL(all_reduce_cube_mesh, CubeMeshArgs) {
  after_predecessor();
  const Common& common = args.common;
  Wait wait;
  Source quad[3];
  u32 far = ((1u << WORLD) - 1) & ~(1u << RANK);
#pragma unroll
  for (u32 k = 0; k < 3; ++k) {
    quad[k] = {args.quad[k], 1u << args.quad[k]};
    far &= ~quad[k].names;
  }
  // Whoever of the other quad is missing, it is its partial that does not come.
  const Source relay[1] = {{args.relay, far}};
  Round round = begin_round(common, args.ll);
  const u64 pass = (u64)blocks() * args.ll.units * 16;
  for (u64 done = 0; done < args.bytes; done += pass) {
    if (done > 0) {
      round = next_round(args.ll, round);
    }
    const u32 count = share(round, args.ll, args.bytes);
    for (u32 i = thread(); i < at_least_one(count); i += threads()) {
      const u64 offset = (round.first + i) * 16;
      Unit v = {0, 0, 0, 0};
      if (i < count) {
        v = lift(load_unit(args.from + offset, args.bytes - offset), args.factor);
      }
#pragma unroll
      for (u32 k = 0; k < 3; ++k) {
        push_unit(common, round, args.quad[k], i, v);
      }
    }
    if (args.bytes - done <= pass) {
      allow_successor();
    }
    for (u32 i = thread(); i < at_least_one(count); i += threads()) {
      const u64 offset = (round.first + i) * 16;
      Unit own = {0, 0, 0, 0}, mate[3], other[1];
      if (i < count) {
        own = lift(load_unit(args.from + offset, args.bytes - offset), args.factor);
      }
      pull_from(common, round, i, quad, mate, wait);
      const Unit half = sum_of_quad(args, own, mate);
      if (!wait.over) {
        // Else it would be taken for a sum.
        push_unit(common, round, args.relay, i, half);
      }
      pull_from(common, round, i, relay, other, wait);
      if (i < count) {
        Sum sum;
        begin(sum, args.first_quad != 0 ? half : other[0]);
        combine(sum, args.first_quad != 0 ? other[0] : half);
        store_unit(args.to + offset, finish(sum), args.bytes - offset);
      }
    }
  }
  end_round(common, args.ll, round);
}
