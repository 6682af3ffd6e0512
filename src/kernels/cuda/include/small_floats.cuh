// Floats narrower than 32 bits: they widen to float exactly, and float rounds back once, to nearest
// even.
#pragma once
#include "arithmetic.cuh"

// A float of a sign bit and, below it, the bits in the mask MAGNITUDE. Values that round to more
// than LARGEST become OVER: infinity if the format has one, otherwise NaN. With UNSIGNED_ZERO the
// format has no infinity and no negative zero: the code of a negative zero is the NaN.
template <
    u32 MANTISSA, u32 BIAS, u32 MAGNITUDE, u32 LARGEST, u32 OVER, u32 QUIET, bool UNSIGNED_ZERO>
struct Small {
  static constexpr u32 SIGN = MAGNITUDE + 1;
  static constexpr u32 CUT = 23 - MANTISSA;
  static constexpr u32 INFINITE = 0x7f800000;
  // The difference between float's exponent and a small float's.
  static constexpr u32 REBIAS = (127 - BIAS) << 23;

  // The code, shifted to the position of a float's bits, is a float: the number divided by a power
  // of two, even if the number is subnormal.
  static DEVICE float widen(u32 code) {
    u32 magnitude = code & MAGNITUDE;
    u32 bits = bits_of(float_of(magnitude << CUT) * float_of((254 - BIAS) << 23));
    if constexpr (UNSIGNED_ZERO) {
      bits = code == QUIET ? 0x7fc00000 : bits;
    } else {
      bits =
          magnitude > LARGEST ? (magnitude == OVER && OVER != QUIET ? INFINITE : 0x7fc00000) : bits;
    }
    return float_of(bits | (code & SIGN ? 0x80000000 : 0));
  }

  static DEVICE u32 narrow(float value) {
    u32 bits = bits_of(value);
    u32 magnitude = bits & 0x7fffffff;
    // Adds half a step, less one, plus the last kept bit, so that ties go to even. A carry moves
    // into the exponent.
    u32 normal = (magnitude - REBIAS + ((1u << (CUT - 1)) - 1) + ((magnitude >> CUT) & 1)) >> CUT;
    // Adding a number whose last bit weighs one subnormal step makes the processor round to that
    // step.
    constexpr u32 MAGIC = (127 + 1 - BIAS - MANTISSA + 23) << 23;
    u32 subnormal = bits_of(float_of(magnitude) + float_of(MAGIC)) - MAGIC;
    u32 rounded = magnitude < REBIAS + (1u << 23) ? subnormal : normal;
    u32 finite = rounded > LARGEST ? OVER : rounded;
    u32 negative = bits >> 31 ? SIGN : 0;
    u32 code = UNSIGNED_ZERO && finite == 0 ? 0 : finite | negative;
    return magnitude > INFINITE ? QUIET : code;
  }
};

using Binary16 = Small<10, 15, 0x7fff, 0x7bff, 0x7c00, 0x7e00, false>;
using E5M2 = Small<2, 15, 0x7f, 0x7b, 0x7c, 0x7f, false>;
using E4M3Fn = Small<3, 7, 0x7f, 0x7e, 0x7f, 0x7f, false>;
using E5M2Fnuz = Small<2, 16, 0x7f, 0x7f, 0x80, 0x80, true>;
using E4M3Fnuz = Small<3, 8, 0x7f, 0x7f, 0x80, 0x80, true>;

#ifdef SYMM_EMULATED
DEVICE void widen_halves(u32 pair, float* to) {
  to[0] = Binary16::widen(pair & 0xffff);
  to[1] = Binary16::widen(pair >> 16);
}
DEVICE u32 narrow_halves(const float* from) {
  return Binary16::narrow(from[0]) | Binary16::narrow(from[1]) << 16;
}
DEVICE u32 narrow_bfloats(const float* from) {
  u32 pair = 0;
  for (u32 i = 0; i < 2; i++) {
    u32 bits = bits_of(canonical(from[i]));
    pair |= (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 << (16 * i);
  }
  return pair;
}
#else
// The conversions make every NaN 0x7fff. Only 0x7fff gains a sign bit when 1 is added; no carry
// leaves a half, since 0xffff does not occur.
template <u32 QUIET>
DEVICE u32 canonical_pair(u32 pair) {
  u32 nans = ((pair + 0x00010001) & ~pair & 0x80008000) >> 15;
  return pair - nans * (0x7fff - QUIET);
}
DEVICE void widen_halves(u32 pair, float* to) {
  asm("{.reg .b16 l,h; mov.b32 {l,h},%2; cvt.f32.f16 %0,l; cvt.f32.f16 %1,h;}"
      : "=f"(to[0]), "=f"(to[1])
      : "r"(pair));
}
DEVICE u32 narrow_halves(const float* from) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(pair) : "f"(from[1]), "f"(from[0]));
  return canonical_pair<0x7e00>(pair);
}
DEVICE u32 narrow_bfloats(const float* from) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(pair) : "f"(from[1]), "f"(from[0]));
  return canonical_pair<0x7fc0>(pair);
}
#endif
