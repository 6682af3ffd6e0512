// Sum of the partial results of all nodes in node order, or pairwise with SYMM_TREE, with the same
// bits as kernels::cpu::reduce_partials. The partial results are equally spaced in this rank's
// memory, each aligned to 16 bytes; the result may have any alignment. The kernel never waits.
#include "units.cuh"
#include "reduction.cuh"

#define MAX_NODES 128

struct SumPartialsArgs {
  const u8* from;
  // Distance from one node's partial result to the next.
  u64 stride;
  u8* to;
  u64 bytes;
  u32 nodes;
  // Divisor of an average.
  u32 divisor;
  // Factor of each node under PREMUL_SUM.
  double factor[MAX_NODES];
};
// src/internode/cuda/sum.rs declares the same layout.
static_assert(sizeof(SumPartialsArgs) == 40 + 8 * MAX_NODES, "");

// Starts `sum` with one node's unit, under PREMUL_SUM times the node's factor. Unlike `lift`, which
// rounds products as a sender does, this does not round.
template <Op OP, typename R>
DEVICE void weigh(typename R::Sum& sum, Unit v, [[maybe_unused]] double factor) {
  R::begin(sum, v);
  if constexpr (OP == Op::PREMUL_SUM) {
#pragma unroll
    for (int i = 0; i < R::COUNT; i++)
      sum.each[i] = sum.each[i] * static_cast<typename R::Acc>(factor);
  }
}

template <Op OP, typename R>
DEVICE void add(typename R::Sum& sum, Unit v, [[maybe_unused]] double factor) {
  if constexpr (OP == Op::PREMUL_SUM) {
    typename R::Sum next;
    weigh<OP, R>(next, v, factor);
#pragma unroll
    for (int i = 0; i < R::COUNT; i++) sum.each[i] = sum.each[i] + next.each[i];
  } else {
    R::combine(sum, v);
  }
}

// Divides under AVG, and rounds once.
template <Op OP, typename R>
DEVICE Unit rounded(const typename R::Sum& sum, [[maybe_unused]] u32 divisor) {
  if constexpr (OP == Op::AVG) {
    typename R::Acc each[R::COUNT];
    if constexpr (R::IN_PLACE) R::widen(sum.words, each);
#pragma unroll
    for (int i = 0; i < R::COUNT; i++) {
      if constexpr (!R::IN_PLACE) each[i] = sum.each[i];
      each[i] = each[i] / static_cast<typename R::Acc>(divisor);
    }
    return R::narrow(each);
  } else {
    return R::partial(sum);
  }
}

#ifdef SYMM_TREE
// Returns the pairwise sum of `leaf(node)` of all nodes. After node h, `held[k]` has a sum of 2^k
// nodes if bit k of h + 1 is set; the loops over k are unrolled, so that sums stay in registers.
template <typename Leaf>
DEVICE Sum sum_of_nodes(u32 nodes, const Leaf& leaf) {
  constexpr u32 LEVELS = 8;
  static_assert(MAX_NODES < 1 << LEVELS, "");
  Sum held[LEVELS];
  for (u32 node = 0; node < nodes; ++node) {
    Sum sum = leaf(node);
    bool placed = false;
#pragma unroll
    for (u32 k = 0; k < LEVELS; ++k) {
      if (!placed && (node >> k & 1)) {
        Chosen::merge(held[k], sum);
        sum = held[k];
      } else if (!placed) {
        held[k] = sum;
        placed = true;
      }
    }
  }
  Sum sum;
  bool any = false;
#pragma unroll
  for (u32 k = 0; k < LEVELS; ++k) {
    if (nodes >> k & 1) {
      if (any) Chosen::merge(held[k], sum);
      sum = held[k];
      any = true;
    }
  }
  return sum;
}
#endif

LANE_KERNEL(sum_partials, SumPartialsArgs) {
  constexpr Op OP = static_cast<Op>(SYMM_OP);
  const u64 step = (u64)blocks() * threads();
  for (u64 i = (u64)block() * threads() + thread(); i < units_of(args.bytes); i += step) {
#ifdef SYMM_TREE
    // steps 1 and 2: combine all nodes' units pairwise; all partial results may be read to the end
    // of a unit
    const Sum sum = sum_of_nodes(args.nodes, [&](u32 node) {
      Sum weighed;
      weigh<OP, Chosen>(
          weighed, *(const Unit*)(args.from + node * args.stride + i * 16), args.factor[node]);
      return weighed;
    });
#else
    // step 1: start with the first node's unit; all partial results may be read to the end of a
    // unit
    Sum sum;
    weigh<OP, Chosen>(sum, *(const Unit*)(args.from + i * 16), args.factor[0]);
    // step 2: combine the other nodes' units in order
    for (u32 node = 1; node < args.nodes; ++node) {
      add<OP, Chosen>(
          sum, *(const Unit*)(args.from + node * args.stride + i * 16), args.factor[node]);
    }
#endif
    // step 3: divide, round once and store
    store_unit(args.to + i * 16, rounded<OP, Chosen>(sum, args.divisor), args.bytes - i * 16);
  }
}
