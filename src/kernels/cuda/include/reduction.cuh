// Reduction of elements, a unit at a time, for the type and operation of this compilation:
// SYMM_DTYPE (c10::ScalarType) and SYMM_OP (c10d::ReduceOp::RedOpType).
//
// A reduction starts with one rank's unit, combines the other units in rank order, and finishes;
// with SYMM_TREE it combines them pairwise. The result has the bits of kernels::cpu::reduce_in on
// every rank and with every protocol, with one exception: under PREMUL_SUM each sender multiplies
// and rounds to the element (`lift`), while the CPU keeps the product in the accumulator. The two
// do not differ for floats of 32 bits or more.
#pragma once
#include "formats.cuh"

// The type in which products are computed: signed products have the same bits as unsigned ones, and
// only unsigned ones may wrap.
template <DType TYPE>
constexpr DType UNSIGNED = TYPE == DType::I8    ? DType::U8
                           : TYPE == DType::I16 ? DType::U16
                           : TYPE == DType::I32 ? DType::U32
                           : TYPE == DType::I64 ? DType::U64
                                                : TYPE;

// Accumulators of a unit: numbers, or the unit itself.
template <typename Acc, int COUNT, bool IN_PLACE>
struct Accumulators {
  Acc each[COUNT];
};
template <typename Acc, int COUNT>
struct Accumulators<Acc, COUNT, true> {
  Unit words;
};

template <DType TYPE, Op OP>
struct Reduction {
  using Format = typename As<OP == Op::PRODUCT ? UNSIGNED<TYPE> : TYPE>::Format;
  using Acc = typename Format::Acc;
  static constexpr int COUNT = 4 / Format::WORDS * Format::PER;

  static constexpr bool IS_BIT_OP = OP == Op::BAND || OP == Op::BOR || OP == Op::BXOR;
  static constexpr bool IS_COMPLEX = TYPE == DType::C64 || TYPE == DType::C128;
  // True for pairs of type and operation with a kernel; no operation divides or scales a bool.
  static constexpr bool SERVED = TYPE == DType::BOOL ? OP != Op::AVG && OP != Op::PREMUL_SUM
                                 : Format::INTEGER   ? OP != Op::PREMUL_SUM
                                 : IS_COMPLEX
                                     ? OP == Op::SUM || OP == Op::AVG || OP == Op::PREMUL_SUM
                                     : !IS_BIT_OP;
  // Integers that can be combined within their words need a quarter of the registers.
  static constexpr bool IN_PLACE =
      TYPE == DType::BOOL || (Format::INTEGER && (IS_BIT_OP || OP == Op::SUM || OP == Op::AVG));

  using Sum = Accumulators<Acc, COUNT, IN_PLACE>;

  static DEVICE void widen(Unit v, Acc* to) {
    if constexpr (Format::WORDS == 1) {
      Format::widen(v.x, to);
      Format::widen(v.y, to + Format::PER);
      Format::widen(v.z, to + 2 * Format::PER);
      Format::widen(v.w, to + 3 * Format::PER);
    } else {
      Format::widen(wide(v.x, v.y), to);
      Format::widen(wide(v.z, v.w), to + 1);
    }
  }
  static DEVICE Unit narrow(const Acc* from) {
    if constexpr (Format::WORDS == 1) {
      return {
          Format::narrow(from), Format::narrow(from + Format::PER),
          Format::narrow(from + 2 * Format::PER), Format::narrow(from + 3 * Format::PER)};
    } else {
      u64 low = Format::narrow(from), high = Format::narrow(from + 1);
      return {
          static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high),
          static_cast<u32>(high >> 32)};
    }
  }

  static DEVICE void begin(Sum& sum, Unit first) {
    if constexpr (IN_PLACE) {
      sum.words = first;
    } else {
      widen(first, sum.each);
    }
  }

  static DEVICE void combine(Sum& sum, Unit next) {
    if constexpr (!IN_PLACE) {
      Sum other;
      begin(other, next);
#pragma unroll
      for (int i = 0; i < COUNT; i++) sum.each[i] = combined<OP>(sum.each[i], other.each[i]);
    } else if constexpr (OP == Op::BXOR) {
      sum.words = differing(sum.words, next);
    } else if constexpr (OP == Op::BAND || OP == Op::MIN || OP == Op::PRODUCT) {
      sum.words = both(sum.words, next);
    } else if constexpr (OP == Op::BOR || TYPE == DType::BOOL) {
      // True + True is True.
      sum.words = either(sum.words, next);
    } else {
      sum.words = added<4 * Format::WORDS / Format::PER>(sum.words, next);
    }
  }

  // Combines `sum` with the sum over later ranks.
  static DEVICE void merge(Sum& sum, const Sum& later) {
    if constexpr (IN_PLACE) {
      combine(sum, later.words);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i++) sum.each[i] = combined<OP>(sum.each[i], later.each[i]);
    }
  }

  static DEVICE Unit partial(const Sum& sum) {
    if constexpr (IN_PLACE) {
      return sum.words;
    } else {
      return narrow(sum.each);
    }
  }

  static DEVICE Unit finish(const Sum& sum) {
    if constexpr (OP == Op::AVG) {
      // The average divides: a product with 1/WORLD would round twice. Integers truncate.
      Acc each[COUNT];
      if constexpr (IN_PLACE) widen(sum.words, each);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        if constexpr (!IN_PLACE) each[i] = sum.each[i];
        each[i] = each[i] / static_cast<Acc>(WORLD);
      }
      return narrow(each);
    } else {
      return partial(sum);
    }
  }

  static DEVICE Unit lift(Unit v, [[maybe_unused]] double factor) {
    if constexpr (OP != Op::PREMUL_SUM) {
      return v;
    } else {
      Acc each[COUNT];
      widen(v, each);
#pragma unroll
      for (int i = 0; i < COUNT; i++) each[i] = each[i] * static_cast<Acc>(factor);
      return narrow(each);
    }
  }
};

// True if a word of all ones consists of NaNs that no reduction produces, so that a protocol may
// use it to mean "not yet arrived". It is false for e4m3fn: a word of four sums, all below the
// lowest finite number, is rounded to all ones.
template <DType TYPE>
constexpr bool IS_NAN_OF_ONES = TYPE == DType::BF16 || TYPE == DType::F16 || TYPE == DType::F32 ||
                                TYPE == DType::C64 || TYPE == DType::F8E5M2;

// Replaces words of all ones in `v` by another NaN. All other words, and every result of a
// reduction, stay as they are.
template <DType TYPE>
DEVICE Unit scrubbed(Unit v) {
  if constexpr (IS_NAN_OF_ONES<TYPE>) {
    // A word with these bits is NaN in all of these types.
    constexpr u32 OTHER = 0xfffefffe;
    v.x = v.x == 0xffffffff ? OTHER : v.x;
    v.y = v.y == 0xffffffff ? OTHER : v.y;
    v.z = v.z == 0xffffffff ? OTHER : v.z;
    v.w = v.w == 0xffffffff ? OTHER : v.w;
  }
  return v;
}

#ifdef SYMM_DTYPE
constexpr bool EMPTY_IS_NAN = IS_NAN_OF_ONES<static_cast<DType>(SYMM_DTYPE)>;
DEVICE Unit scrub(Unit v) { return scrubbed<static_cast<DType>(SYMM_DTYPE)>(v); }
#ifdef SYMM_OP
using Chosen = Reduction<static_cast<DType>(SYMM_DTYPE), static_cast<Op>(SYMM_OP)>;
static_assert(Chosen::SERVED, "this operation is not defined for this type");
// Accumulators of one unit.
using Sum = Chosen::Sum;
DEVICE void begin(Sum& sum, Unit first) { Chosen::begin(sum, first); }
DEVICE void combine(Sum& sum, Unit next) { Chosen::combine(sum, next); }
// Rounds the sum over some of the ranks once, as an input of another reduction.
DEVICE Unit partial(const Sum& sum) { return Chosen::partial(sum); }
// Finishes a reduction: divides under AVG, and rounds once.
DEVICE Unit finish(const Sum& sum) { return Chosen::finish(sum); }
// Returns the unit that a rank contributes: under PREMUL_SUM its elements times `factor`.
DEVICE Unit lift(Unit v, double factor) { return Chosen::lift(v, factor); }
#ifdef SYMM_TREE
// Returns the largest power of two below `count`.
DEVICE constexpr u32 half_of(u32 count) {
  u32 half = 1;
  while (2 * half < count) half *= 2;
  return half;
}

// Returns the pairwise sum of `leaf(r)` of COUNT ranks, starting from FIRST.
template <u32 FIRST, u32 COUNT, typename Leaf>
DEVICE Sum pairwise(const Leaf& leaf) {
  Sum sum;
  if constexpr (COUNT == 1) {
    begin(sum, leaf(FIRST));
  } else {
    constexpr u32 HALF = half_of(COUNT);
    sum = pairwise<FIRST, HALF>(leaf);
    Chosen::merge(sum, pairwise<FIRST + HALF, COUNT - HALF>(leaf));
  }
  return sum;
}
#endif
// Returns the sum of `leaf(r)`, a unit of each rank r, in rank order or, with SYMM_TREE, pairwise.
template <typename Leaf>
DEVICE Unit sum_over_ranks(const Leaf& leaf) {
#ifdef SYMM_TREE
  return finish(pairwise<0, WORLD>(leaf));
#else
  Sum sum;
  begin(sum, leaf(0));
#pragma unroll
  for (u32 r = 1; r < WORLD; ++r) {
    combine(sum, leaf(r));
  }
  return finish(sum);
#endif
}
// Returns the sum of one unit of each rank.
DEVICE Unit sum_in_order(const Unit (&v)[WORLD]) {
  return sum_over_ranks([&](u32 r) { return v[r]; });
}
#endif
#endif
