// All-reduce of short messages on LL lines, along the edges of a hybrid cube mesh. Every rank has
// links to the three others of its quad and to one rank, its relay, in the other quad. It writes
// neither data nor flags to any other rank. The algorithm has two phases:
//   1. Each rank sends its units to its quad and adds the quad's four units in rank order, rounding
//      once.
//   2. Each rank sends this partial sum to its relay and adds the two partial sums, first the one
//      of rank 0's quad.
//
// For a message of S bytes each rank sends 4 S bytes of data and 4 S bytes of flags, in two trips.
//
// The result has the same bits on all ranks: all four ranks of a quad compute the same partial sum,
// and all eight combine the same two in the same order. The bits differ from a sum in rank order,
// because each quad's sum is rounded.
//
// Two buffers suffice (low_latency.cuh) because a block that ends an epoch knows that the same
// block of all ranks has started it:
// - Its quad's units came directly from the ranks of its quad.
// - A thread of its relay sends the partial sum only after it has received units of all ranks of
//   the relay's quad, and those ranks send none before they start the epoch.
// - Every block sends at least one unit in each phase of every epoch, with or without data.
//
// So these epochs may alternate with the epochs of any other kernel on the same lines, in which
// every rank receives from every peer: these kernels all count the same epochs. The two phases
// share an epoch: a rank sends to lines with its own index, to its quad only in the first phase and
// to its relay only in the second, so no line is written twice.
#include "low_latency.cuh"
#include "reduction.cuh"

struct CubeMeshArgs {
  Common common;
  LowLatency ll;
  const u8* from;
  u8* to;
  u64 bytes;
  double factor;
  // The three other ranks of this rank's quad, in ascending order.
  u32 quad[3];
  u32 relay;
  // Not 0 if rank 0 is in this rank's quad.
  u32 first_quad;
};
static_assert(sizeof(CubeMeshArgs) == 240, "");

// Returns the partial sum of the quad in rank order, with `own` at this rank's position.
DEVICE Unit sum_of_quad(const CubeMeshArgs& args, Unit own, const Unit (&mate)[3]) {
  Sum sum;
  begin(sum, RANK < args.quad[0] ? own : mate[0]);
#pragma unroll
  for (u32 k = 1; k < 3; ++k) {
    // This rank is at position k if k mates precede it; each later mate i is at position i + 1.
    combine(sum, RANK < args.quad[k - 1] ? mate[k - 1] : RANK < args.quad[k] ? own : mate[k]);
  }
  combine(sum, RANK < args.quad[2] ? mate[2] : own);
  return partial(sum);
}

KERNEL(all_reduce_cube_mesh, CubeMeshArgs) {
  after_predecessor();
  // step 1: find the ranks to wait for, and the ranks to name if nothing arrives
  Source quad[3];
  u32 far = all_peers();
#pragma unroll
  for (u32 k = 0; k < 3; ++k) {
    quad[k] = {args.quad[k], 1u << args.quad[k]};
    far &= ~quad[k].names;
  }
  // The relay's partial sum depends on the whole other quad: it does not arrive if any of these
  // ranks is missing.
  const Source relay[1] = {{args.relay, far}};
  LowLatencySession session(args.common, args.ll);
  session.begin();
  const u64 pass = (u64)blocks() * args.ll.units * 16;
  // step 2: repeat steps 3 to 6; each epoch carries as much as all blocks together can
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
      // step 4: receive the quad's units and add them in rank order
      session.receive_from(quad, i, mate);
      const Unit half = sum_of_quad(args, own, mate);
      // step 5: send the partial sum to the relay
      session.send(args.relay, i, half);
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
