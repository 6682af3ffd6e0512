// Conversions of floats to float32 and back, with the bits of kernels::cpu::widen and
// kernels::cpu::narrow. SYMM_DTYPE is the narrower type, whose elements may have any alignment; the
// float32 are aligned to 16 bytes. The kernels never wait.
#include "units.cuh"
#include "reduction.cuh"

struct CastArgs {
  const u8* from;
  u8* to;
  // Number of elements.
  u64 count;
};
// src/internode/cuda/cast.rs declares the same layout.
static_assert(sizeof(CastArgs) == 24, "");

using Narrow = Reduction<static_cast<DType>(SYMM_DTYPE), Op::SUM>;
// Size of an element in bytes.
constexpr u64 SIZE = 16 / Narrow::COUNT;

LANE_KERNEL(widen_floats, CastArgs) {
  const u64 step = (u64)blocks() * threads();
  float* const to = (float*)args.to;
  for (u64 i = (u64)block() * threads() + thread(); i * Narrow::COUNT < args.count; i += step) {
    const u64 begin = i * Narrow::COUNT;
    typename Narrow::Acc each[Narrow::COUNT];
    Narrow::widen(load_unit(args.from + begin * SIZE, (args.count - begin) * SIZE), each);
#pragma unroll
    for (int e = 0; e < Narrow::COUNT; e++) {
      if (begin + e < args.count) to[begin + e] = static_cast<float>(each[e]);
    }
  }
}

LANE_KERNEL(round_floats, CastArgs) {
  const u64 step = (u64)blocks() * threads();
  const float* const from = (const float*)args.from;
  for (u64 i = (u64)block() * threads() + thread(); i * Narrow::COUNT < args.count; i += step) {
    const u64 begin = i * Narrow::COUNT;
    typename Narrow::Acc each[Narrow::COUNT];
#pragma unroll
    for (int e = 0; e < Narrow::COUNT; e++) {
      each[e] = static_cast<typename Narrow::Acc>(begin + e < args.count ? from[begin + e] : 0.0f);
    }
    store_unit(args.to + begin * SIZE, Narrow::narrow(each), (args.count - begin) * SIZE);
  }
}
