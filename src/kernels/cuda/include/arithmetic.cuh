// Arithmetic of reductions: conversions between bits and numbers, and one step of each operation.
// kernels::cpu computes the same bits: no operation is contracted (--fmad=false), flushed or
// reordered.
#pragma once
#include "device.cuh"

// Element types, with the codes of c10::ScalarType.
enum class DType {
  U8 = 0, I8 = 1, I16 = 2, I32 = 3, I64 = 4, F16 = 5, F32 = 6, F64 = 7, C64 = 9, C128 = 10,
  BOOL = 11, BF16 = 15, F8E5M2 = 23, F8E4M3FN = 24, F8E5M2FNUZ = 25, F8E4M3FNUZ = 26, U16 = 27,
  U32 = 28, U64 = 29,
};

// Operations, with the codes of c10d::ReduceOp::RedOpType.
enum class Op {
  SUM = 0, AVG = 1, PRODUCT = 2, MIN = 3, MAX = 4, BAND = 5, BOR = 6, BXOR = 7, PREMUL_SUM = 8,
};

#ifdef SYMM_EMULATED
DEVICE float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
DEVICE u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
DEVICE double double_of(u64 bits) { return __builtin_bit_cast(double, bits); }
DEVICE u64 bits_of(double value) { return __builtin_bit_cast(u64, value); }
#else
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE double double_of(u64 bits) { return __longlong_as_double(static_cast<i64>(bits)); }
DEVICE u64 bits_of(double value) { return static_cast<u64>(__double_as_longlong(value)); }
#endif

// Replaces a NaN by the format's canonical one, because processors differ in the payload that an
// addition propagates.
DEVICE float canonical(float value) { return value != value ? float_of(0x7fc00000) : value; }
DEVICE double canonical(double value) {
  return value != value ? double_of(0x7ff8000000000000) : value;
}

// Minimum and maximum of two numbers. Any NaN wins; if both are equal the first stays, so the order
// of the ranks decides between zeros of either sign. Integers are never NaN.
template <typename A>
DEVICE A lesser(A sum, A next) {
  return (next < sum) | (next != next) ? next : sum;
}
template <typename A>
DEVICE A greater(A sum, A next) {
  return (next > sum) | (next != next) ? next : sum;
}

template <Op OP, typename A>
DEVICE A combined(A sum, A next) {
  if constexpr (OP == Op::PRODUCT) {
    return sum * next;
  } else if constexpr (OP == Op::MIN) {
    return lesser(sum, next);
  } else if constexpr (OP == Op::MAX) {
    return greater(sum, next);
  } else {
    static_assert(
        OP == Op::SUM || OP == Op::AVG || OP == Op::PREMUL_SUM,
        "bit operations act on whole words");
    return sum + next;
  }
}

// Adds integers of SIZE bytes within a word, without a carry from one into the next.
template <int SIZE>
DEVICE u32 added_within(u32 sum, u32 next) {
  if constexpr (SIZE == 4) return sum + next;
  constexpr u32 TOP = SIZE == 1 ? 0x80808080 : 0x80008000;
  return ((sum & ~TOP) + (next & ~TOP)) ^ ((sum ^ next) & TOP);
}

DEVICE u64 wide(u32 low, u32 high) { return low | static_cast<u64>(high) << 32; }

// Adds all of a unit's integers of SIZE bytes; each wraps.
template <int SIZE>
DEVICE Unit added(Unit sum, Unit next) {
  if constexpr (SIZE == 8) {
    u64 low = wide(sum.x, sum.y) + wide(next.x, next.y);
    u64 high = wide(sum.z, sum.w) + wide(next.z, next.w);
    return {
        static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high),
        static_cast<u32>(high >> 32)};
  } else {
    return {
        added_within<SIZE>(sum.x, next.x), added_within<SIZE>(sum.y, next.y),
        added_within<SIZE>(sum.z, next.z), added_within<SIZE>(sum.w, next.w)};
  }
}
DEVICE Unit both(Unit a, Unit b) { return {a.x & b.x, a.y & b.y, a.z & b.z, a.w & b.w}; }
DEVICE Unit either(Unit a, Unit b) { return {a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w}; }
DEVICE Unit differing(Unit a, Unit b) { return {a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w}; }
