// All-reduce of short messages on LL lines, along the edges of a hybrid cube mesh.
// Every rank has links to the three others of its quad and to one rank, its relay, in the other quad. It writes nothing, neither data nor
// flags, to any other rank. The algorithm has two phases:
//   1. Each rank sends its units to its quad, and adds up the quad's four in rank order, rounding once.
//   2. Each rank sends this partial sum to its relay, and adds the two partial sums, that of the quad with rank 0 first.
// Each rank sends 4 S, and as much again of flags, in two trips over the link.
//
// The result has the same bits on all ranks: all four of a quad compute the same partial sum, and all eight combine the same two in the
// same order. These bits are not those of a sum in rank order, because each quad's sum is rounded.
//
// Two buffers suffice (low_latency.cuh) because a block that ends an epoch knows that the same block of all ranks has begun it:
// - Its quad's units came from the quad itself.
// - Its relay's partial sum was sent by a thread that had units of all of the relay's quad, who send none before they begin the epoch.
// - Every block sends at least one unit in either phase of every epoch, data or not.
// So these epochs may alternate with those of any other kernel on the same lines, in which all ranks receive from all: both count
// the same. The two phases share an epoch: what a rank sends lies at its own index, and it sends to its quad in the first phase only and to
// its relay in the second only, so no line is written twice.
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
  // Flag that is not 0 if rank 0 is in this rank's quad.
  u32 first_quad;
};
static_assert(sizeof(CubeMeshArgs) == 240, "");

// Partial sum of the quad in rank order, with `own` in its place among the ranks.
DEVICE Unit sum_of_quad(const CubeMeshArgs& args, Unit own, const Unit (&mate)[3]) {
  Sum sum;
  begin(sum, RANK < args.quad[0] ? own : mate[0]);
#pragma unroll
  for (u32 k = 1; k < 3; ++k) {
    // Position k is this rank's if k mates come before it; the mates after it have moved up by one.
    combine(sum, RANK < args.quad[k - 1] ? mate[k - 1] : RANK < args.quad[k] ? own : mate[k]);
  }
  combine(sum, RANK < args.quad[2] ? mate[2] : own);
  return partial(sum);
}

KERNEL(all_reduce_cube_mesh, CubeMeshArgs) {
  after_predecessor();
  // step 1: find whom to wait for, and whom to name if nothing comes
  Source quad[3];
  u32 far = all_peers();
#pragma unroll
  for (u32 k = 0; k < 3; ++k) {
    quad[k] = {args.quad[k], 1u << args.quad[k]};
    far &= ~quad[k].names;
  }
  // The relay's partial sum names the whole other quad: it does not come if any of them is missing.
  const Source relay[1] = {{args.relay, far}};
  LowLatencySession session(args.common, args.ll);
  session.begin();
  const u64 pass = (u64)blocks() * args.ll.units * 16;
  // step 2: repeat steps 3 to 6 in epochs of what all blocks together carry
  for (u64 done = 0; done < args.bytes; done += pass) {
    if (done > 0) {
      session.next_epoch();
    }
    const u32 count = session.share(args.bytes);
    // step 3: send this rank's units to the three others of its quad
    for (u32 i = thread(); i < at_least_one(count); i += threads()) {
      const u64 offset = (session.first + i) * 16;
      Unit v = {0, 0, 0, 0};
      if (i < count) {
        v = lift(load_unit(args.from + offset, args.bytes - offset), args.factor);
      }
#pragma unroll
      for (u32 k = 0; k < 3; ++k) {
        session.send(args.quad[k], i, v);
      }
    }
    if (args.bytes - done <= pass) {
      allow_successor();
    }
    for (u32 i = thread(); i < at_least_one(count); i += threads()) {
      const u64 offset = (session.first + i) * 16;
      Unit own = {0, 0, 0, 0}, mate[3], other[1];
      if (i < count) {
        own = lift(load_unit(args.from + offset, args.bytes - offset), args.factor);
      }
      // step 4: receive the quad's units and add them up in rank order
      session.receive_from(quad, i, mate);
      const Unit half = sum_of_quad(args, own, mate);
      // step 5: send the partial sum to the relay
      if (!session.wait.over) {
        // After a wait that gave up, `half` is no sum, and the relay would take it for one.
        session.send(args.relay, i, half);
      }
      // step 6: receive the relay's partial sum, add the two, store the result
      session.receive_from(relay, i, other);
      if (i < count) {
        Sum sum;
        begin(sum, args.first_quad != 0 ? half : other[0]);
        combine(sum, args.first_quad != 0 ? other[0] : half);
        store_unit(args.to + offset, finish(sum), args.bytes - offset);
      }
    }
  }
  // step 7: end the epoch
  session.end();
}
