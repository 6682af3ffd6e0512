// Reductions without a protocol: each thread folds units of all ranks. SYMM_DTYPE and SYMM_OP
// select one pair of type and operation; without them the kernel takes any.
#include "reduction.cuh"

struct Args {
  const Unit* in[WORLD];
  Unit* out;
  u64 units;
  double factors[WORLD];
  u32 dtype, op;
};

#ifdef SYMM_DTYPE
KERNEL(reduce_units, Args) {
  for (u64 i = block() * threads() + thread(); i < args.units; i += blocks() * threads()) {
    Sum sum;
    begin(sum, lift(args.in[0][i], args.factors[0]));
#pragma unroll
    for (int rank = 1; rank < WORLD; rank++)
      combine(sum, lift(args.in[rank][i], args.factors[rank]));
    args.out[i] = finish(sum);
  }
}

KERNEL(scrub_units, Args) {
  for (u64 i = block() * threads() + thread(); i < args.units; i += blocks() * threads())
    args.out[i] = scrub(args.in[0][i]);
}
#else
template <DType TYPE, Op OP>
DEVICE void reduce_as(const Args& args) {
  using Reduce = Reduction<TYPE, OP>;
  if constexpr (Reduce::SERVED) {
    for (u64 i = thread(); i < args.units; i += threads()) {
      typename Reduce::Sum sum;
      Reduce::begin(sum, Reduce::lift(args.in[0][i], args.factors[0]));
      for (int rank = 1; rank < WORLD; rank++)
        Reduce::combine(sum, Reduce::lift(args.in[rank][i], args.factors[rank]));
      args.out[i] = Reduce::finish(sum);
    }
  }
}

template <int DTYPE, int OP = 0>
DEVICE void reduce_op(const Args& args) {
  if (args.op == OP) reduce_as<static_cast<DType>(DTYPE), static_cast<Op>(OP)>(args);
  if constexpr (OP < 8) reduce_op<DTYPE, OP + 1>(args);
}

template <int... DTYPES>
DEVICE void reduce_any(const Args& args) {
  ((args.dtype == DTYPES ? reduce_op<DTYPES>(args) : void()), ...);
}

KERNEL(reduce_units, Args) {
  reduce_any<0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 10, 15, 23, 24, 25, 26, 27, 28, 29>(args);
}
#endif
