// Residual and norm of rows of a sum over ranks. One cluster of blocks (one block, unless clusters
// were requested) handles a row, and its threads keep the row in registers while they add its
// squares and then normalise it. `kernels::cpu::norm` computes the same bits: it documents where
// numbers are rounded and in which order squares are added.
#pragma once
#include "sentinel.cuh"

// GROUP: neighbours whose squares one thread adds. ELEMENTS: elements of a unit. PARTS: units of a
// group. MOST: maximum number of groups of a thread. Kernels have a short path for rows in which
// each thread has one group at an aligned address (`K` = 1), and one path for all others (`K` =
// MOST).
constexpr u32 GROUP = 8;
constexpr u32 ELEMENTS = Chosen::COUNT;
constexpr u32 PARTS = GROUP / ELEMENTS;
constexpr u32 MOST = 4;
// LANES: accumulators to which the groups of a row are added. BLOCK: accumulators that a warp folds
// into one number; each thread of the warp has one.
constexpr u32 LANES = 1024;
constexpr u32 BLOCK = 32;

// The type of the returned rows; `Normed` in src/coll/all_reduce_norm.rs.
enum class Normed : u32 { SAME = 0, STATIC = 1, DYNAMIC = 2 };

// Arguments of the kernels that normalise rows.
struct NormArgs {
  Common common;
  Sentinel sentinel;
  // This rank's input, or the sum over ranks.
  const u8* from;
  const u8* residual;
  const u8* weight;
  // Scale of all normalised elements under STATIC.
  const float* scale;
  u8* normed;
  // Sum with the residual.
  u8* sum;
  // Scale of each row under DYNAMIC.
  float* scales;
  u64 rows;
  // Number of elements of a row, a multiple of GROUP.
  u32 hidden;
  float eps;
  Normed type;
};
static_assert(sizeof(NormArgs) == 264, "");

DEVICE u32 row_units(const NormArgs& args) {
  return args.hidden / GROUP * PARTS;
}

// A thread's part of each row: the groups `group(k)` for each k below MOST for which `has(k)` is
// true. The threads of a cluster share each row. If threads have several groups, the number of
// threads is LANES or half of it.
struct Share {
  u32 groups;
  u32 lane = cluster_block() * threads() + thread();
  u32 lanes = cluster_blocks() * threads();

  DEVICE explicit Share(const NormArgs& args) : groups(args.hidden / GROUP) {}

  DEVICE u32 group(u32 k) const { return lane + k * lanes; }
  DEVICE bool has(u32 k) const { return group(k) < groups; }
  // Returns true if the path for one group applies to `args`. The code of that path loads into the
  // instruction cache in a third of the time.
  DEVICE bool is_plain(const NormArgs& args) const {
    const u64 any =
        (u64)args.from | (u64)args.residual | (u64)args.weight | (u64)args.normed | (u64)args.sum;
    return groups <= lanes && any % 16 == 0;
  }
  // Returns the index of unit `p` of this thread's group `k` in row `row` among the units that the
  // block sends. Rows count from the block's first row.
  DEVICE u32 place(u32 row, u32 k, u32 p) const {
    const u32 most = quotient_up(groups, lanes);
    return ((row * most + k) * PARTS + p) * threads() + thread();
  }
};

// Load and store a unit of a row.
template <u32 K>
DEVICE Unit load_of(const u8* from) {
  if constexpr (K == 1) {
    return *(const Unit*)from;
  }
  return load_unit(from, 16);
}
template <u32 K>
DEVICE void store_of(u8* to, Unit unit) {
  if constexpr (K == 1) {
    *(Unit*)to = unit;
  } else {
    store_unit(to, unit, 16);
  }
}

#ifdef SYMM_EMULATED
DEVICE float square_root(float value) { return __builtin_sqrtf(value); }

// Folds `count` values, a power of two, in halves.
template <typename Fold>
DEVICE float in_halves(float* values, u32 count, Fold fold) {
  for (u32 half = count / 2; half > 0; half /= 2) {
    for (u32 i = 0; i < half; ++i) values[i] = fold(values[i], values[i + half]);
  }
  return values[0];
}

// Folds one number of each group of a row. `turn` counts the calls.
template <u32 K, typename Fold>
DEVICE float over_row(const float (&of_group)[K], const Share& share, u32& turn, Fold fold) {
  float* const shared = cluster_floats() + turn++ % 2 * LANES;
  for (u32 k = 0; k < K; ++k) {
    if (share.has(k)) shared[share.group(k)] = of_group[k];
  }
  arrive_cluster();
  wait_cluster();
  float lanes[LANES] = {};
  for (u32 group = 0; group < share.groups; ++group) lanes[group] = shared[group];
  float blocks[BLOCK];
  for (u32 i = 0; i < BLOCK; ++i) blocks[i] = in_halves(lanes + i * BLOCK, BLOCK, fold);
  return in_halves(blocks, BLOCK, fold);
}
#else
DEVICE float square_root(float value) { return __fsqrt_rn(value); }

template <typename Fold>
DEVICE float over_warp(float value, Fold fold) {
#pragma unroll
  for (u32 distance = BLOCK / 2; distance > 0; distance /= 2) {
    value = fold(value, __shfl_xor_sync(~0u, value, distance));
  }
  return value;
}

// Folds one number of each group of a row; missing groups count as 0, and `fold` with 0 must not
// change a number. `turn` counts the calls and selects one of two buffers. A thread writes a buffer
// again two calls later, after the barrier of the call in between; every thread has read the buffer
// before that barrier.
template <u32 K, typename Fold>
DEVICE float over_row(const float (&of_group)[K], const Share& share, u32& turn, Fold fold) {
  __shared__ float shared[2][BLOCK];
  float* const blocks = shared[turn++ % 2];
  const u32 place = thread() % BLOCK, warp = share.lane / BLOCK;
  // step 1: fold each block of accumulators, and send the result to all blocks of the cluster
  const auto tell = [&](u32 at, float value) {
    if (cluster_blocks() == 1) {
      if (place == 0) {
        blocks[at] = value;
      }
    } else if (place < cluster_blocks()) {
      store_in_cluster(&blocks[at], place, value);
    }
  };
  if constexpr (K == 1) {
    tell(warp, over_warp(of_group[0], fold));
  } else {
    const bool halves = share.lanes < LANES && share.groups > share.lanes;
    tell(warp, over_warp(fold(of_group[0], halves ? of_group[2] : of_group[1]), fold));
    if (halves) {
      tell(warp + share.lanes / BLOCK, over_warp(fold(of_group[1], of_group[3]), fold));
    }
  }
  if (cluster_blocks() == 1) {
    sync_block();
  } else {
    arrive_cluster();
    wait_cluster();
  }
  // step 2: fold the blocks
  const u32 used = quotient_up(share.groups, BLOCK);
  return over_warp(place < used ? blocks[place] : 0.0f, fold);
}
#endif

// Stores GROUP numbers as float8_e4m3fn; numbers beyond the largest value become that value, and
// NaN stays NaN.
DEVICE void store_codes(u8* to, const float (&values)[GROUP]) {
  constexpr float LARGEST = 448.0f;
  u32 words[2] = {0, 0};
#pragma unroll
  for (u32 i = 0; i < GROUP; ++i) {
    const float below = values[i] > LARGEST ? LARGEST : values[i];
    words[i / 4] |= E4M3Fn::narrow(below < -LARGEST ? -LARGEST : below) << (i % 4 * 8);
  }
  if ((u64)to % 8 == 0) {
    *(u64*)to = wide(words[0], words[1]);
  } else {
    store_unit(to, {words[0], words[1], 0, 0}, 8);
  }
}

// Normalises row `row`; `summed(k, p)` returns part p of this thread's group k, summed over the
// ranks. All threads of the cluster call it with the same `turn`, initially 0, once all blocks of
// the cluster have started.
template <u32 K, typename Summed>
DEVICE void norm_row(const NormArgs& args, const Share& share, u64 row, u32& turn, Summed summed) {
  const u64 at = row * row_units(args) * 16;
  Unit kept[K][PARTS];
  // Not kept for float32, whose kernels have too few registers.
  Unit weight[K];
  // step 1: load the operands that no peer sends
#pragma unroll
  for (u32 k = 0; k < K; ++k) {
#pragma unroll
    for (u32 p = 0; p < PARTS; ++p) {
      const u64 offset = (u64)(share.group(k) * PARTS + p) * 16;
      if (share.has(k)) {
        kept[k][p] = load_of<K>(args.residual + at + offset);
        if constexpr (PARTS == 1) {
          weight[k] = load_of<K>(args.weight + offset);
        }
      }
    }
  }
  // step 2: add the residual to the sum, round and store the result, and add the squares of the
  // rounded numbers
  float squares[K];
#pragma unroll
  for (u32 k = 0; k < K; ++k) {
    squares[k] = 0;
    if (share.has(k)) {
      float q[GROUP];
#pragma unroll
      for (u32 p = 0; p < PARTS; ++p) {
        const u64 offset = (u64)(share.group(k) * PARTS + p) * 16;
        float own[ELEMENTS], other[ELEMENTS];
        Chosen::widen(summed(k, p), own);
        Chosen::widen(kept[k][p], other);
#pragma unroll
        for (u32 i = 0; i < ELEMENTS; ++i) own[i] = own[i] + other[i];
        kept[k][p] = Chosen::narrow(own);
        store_of<K>(args.sum + at + offset, kept[k][p]);
        Chosen::widen(kept[k][p], own);
#pragma unroll
        for (u32 i = 0; i < ELEMENTS; ++i) q[p * ELEMENTS + i] = own[i] * own[i];
      }
      squares[k] = ((q[0] + q[4]) + (q[2] + q[6])) + ((q[1] + q[5]) + (q[3] + q[7]));
    }
  }
  const float total = over_row(squares, share, turn, [](float a, float b) { return a + b; });
  const float inverse = 1.0f / square_root(total / static_cast<float>(args.hidden) + args.eps);
  // step 3: normalise, round and store, or keep the result for the next step
  float largest[K];
#pragma unroll
  for (u32 k = 0; k < K; ++k) {
    largest[k] = 0;
    if (share.has(k)) {
#pragma unroll
      for (u32 p = 0; p < PARTS; ++p) {
        float own[ELEMENTS], by[ELEMENTS];
        const u64 offset = (u64)(share.group(k) * PARTS + p) * 16;
        Chosen::widen(kept[k][p], own);
        Chosen::widen(PARTS == 1 ? weight[k] : load_of<K>(args.weight + offset), by);
#pragma unroll
        for (u32 i = 0; i < ELEMENTS; ++i) own[i] = own[i] * inverse * by[i];
        kept[k][p] = Chosen::narrow(own);
        if (args.type == Normed::SAME) {
          store_of<K>(args.normed + at + offset, kept[k][p]);
        } else {
          Chosen::widen(kept[k][p], own);
#pragma unroll
          for (u32 i = 0; i < ELEMENTS; ++i)
            largest[k] = greater(largest[k], own[i] < 0 ? -own[i] : own[i]);
        }
      }
    }
  }
  if (args.type == Normed::SAME) {
    return;
  }
  // step 4: find the scale, and store the scaled numbers
  float scale = 0;
  if (args.type == Normed::DYNAMIC) {
    const float most =
        over_row(largest, share, turn, [](float a, float b) { return greater(a, b); });
    scale = greater(1.0f / (448.0f * 512.0f), most / 448.0f);
    if (share.lane == 0) {
      args.scales[row] = canonical(scale);
    }
  } else {
    scale = 1.0f / *args.scale;
  }
#pragma unroll
  for (u32 k = 0; k < K; ++k) {
    if (share.has(k)) {
      float values[GROUP];
#pragma unroll
      for (u32 p = 0; p < PARTS; ++p) {
        Chosen::widen(kept[k][p], values + p * ELEMENTS);
      }
#pragma unroll
      for (u32 i = 0; i < GROUP; ++i)
        values[i] = args.type == Normed::DYNAMIC ? values[i] / scale : values[i] * scale;
      store_codes(args.normed + row * args.hidden + share.group(k) * GROUP, values);
    }
  }
}
