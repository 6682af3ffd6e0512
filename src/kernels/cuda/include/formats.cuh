// Formats of the element types in the words of a unit: `widen` and `narrow` convert between WORDS
// words and PER accumulators.
#pragma once
#include "small_floats.cuh"

// Integers of SIZE bytes in an accumulator A of at least that size; `narrow` truncates.
template <typename A, int SIZE, bool SIGNED>
struct Integers {
  using Acc = A;
  static constexpr bool INTEGER = true;
  static constexpr int WORDS = 1, PER = 4 / SIZE;
  static DEVICE void widen(u32 word, A* to) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
      u32 top = word << (32 - 8 * SIZE * (i + 1));
      to[i] = SIGNED ? static_cast<A>(static_cast<int>(top) >> (32 - 8 * SIZE))
                     : static_cast<A>(top >> (32 - 8 * SIZE));
    }
  }
  static DEVICE u32 narrow(const A* from) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
      word |= (static_cast<u32>(from[i]) << (32 - 8 * SIZE)) >> (32 - 8 * SIZE * (i + 1));
    return word;
  }
};

template <typename A>
struct LongIntegers {
  using Acc = A;
  static constexpr bool INTEGER = true;
  static constexpr int WORDS = 2, PER = 1;
  static DEVICE void widen(u64 words, A* to) { *to = static_cast<A>(words); }
  static DEVICE u64 narrow(const A* from) { return static_cast<u64>(*from); }
};

struct Floats {
  using Acc = float;
  static constexpr bool INTEGER = false;
  static constexpr int WORDS = 1, PER = 1;
  static DEVICE void widen(u32 word, float* to) { *to = float_of(word); }
  static DEVICE u32 narrow(const float* from) { return bits_of(canonical(*from)); }
};

struct Doubles {
  using Acc = double;
  static constexpr bool INTEGER = false;
  static constexpr int WORDS = 2, PER = 1;
  static DEVICE void widen(u64 words, double* to) { *to = double_of(words); }
  static DEVICE u64 narrow(const double* from) { return bits_of(canonical(*from)); }
};

struct Halves {
  using Acc = float;
  static constexpr bool INTEGER = false;
  static constexpr int WORDS = 1, PER = 2;
  static DEVICE void widen(u32 word, float* to) { widen_halves(word, to); }
  static DEVICE u32 narrow(const float* from) { return narrow_halves(from); }
};

struct Bfloats {
  using Acc = float;
  static constexpr bool INTEGER = false;
  static constexpr int WORDS = 1, PER = 2;
  static DEVICE void widen(u32 word, float* to) {
    to[0] = float_of(word << 16);
    to[1] = float_of(word & 0xffff0000);
  }
  static DEVICE u32 narrow(const float* from) { return narrow_bfloats(from); }
};

// Floats of 8 bits, narrowed by arithmetic: the processors' conversions to 8 bits saturate where
// torch's overflow.
template <typename Format>
struct Bytes {
  using Acc = float;
  static constexpr bool INTEGER = false;
  static constexpr int WORDS = 1, PER = 4;
  static DEVICE void widen(u32 word, float* to) {
#pragma unroll
    for (int i = 0; i < PER; i++) to[i] = Format::widen((word >> (8 * i)) & 0xff);
  }
  static DEVICE u32 narrow(const float* from) {
    return Format::narrow(from[0]) | Format::narrow(from[1]) << 8 | Format::narrow(from[2]) << 16 |
           Format::narrow(from[3]) << 24;
  }
};

// E5M2 is a truncated binary16.
struct BytesE5M2 : Bytes<E5M2> {
  static DEVICE void widen(u32 word, float* to) {
    float even[2], odd[2];
    widen_halves((word << 8) & 0xff00ff00, even);
    widen_halves(word & 0xff00ff00, odd);
    to[0] = even[0];
    to[1] = odd[0];
    to[2] = even[1];
    to[3] = odd[1];
  }
};

struct BytesE4M3Fn : Bytes<E4M3Fn> {
#if __CUDA_ARCH__ >= 890
  static DEVICE void widen(u32 word, float* to) {
    u32 low, high;
    asm("{.reg .b16 l,h; mov.b32 {l,h},%2; cvt.rn.f16x2.e4m3x2 %0,l; cvt.rn.f16x2.e4m3x2 %1,h;}"
        : "=r"(low), "=r"(high)
        : "r"(word));
    widen_halves(low, to);
    widen_halves(high, to + 2);
  }
#endif
};

// The format of each element type. A complex number is two numbers, and every supported operation
// acts on each part separately.
template <DType>
struct As;
template <> struct As<DType::U8> { using Format = Integers<u32, 1, false>; };
template <> struct As<DType::I8> { using Format = Integers<int, 1, true>; };
template <> struct As<DType::U16> { using Format = Integers<u32, 2, false>; };
template <> struct As<DType::I16> { using Format = Integers<int, 2, true>; };
template <> struct As<DType::U32> { using Format = Integers<u32, 4, false>; };
template <> struct As<DType::I32> { using Format = Integers<int, 4, true>; };
template <> struct As<DType::U64> { using Format = LongIntegers<u64>; };
template <> struct As<DType::I64> { using Format = LongIntegers<i64>; };
template <> struct As<DType::BOOL> { using Format = Integers<u32, 1, false>; };
template <> struct As<DType::F16> { using Format = Halves; };
template <> struct As<DType::BF16> { using Format = Bfloats; };
template <> struct As<DType::F32> { using Format = Floats; };
template <> struct As<DType::F64> { using Format = Doubles; };
template <> struct As<DType::C64> { using Format = Floats; };
template <> struct As<DType::C128> { using Format = Doubles; };
template <> struct As<DType::F8E5M2> { using Format = BytesE5M2; };
template <> struct As<DType::F8E4M3FN> { using Format = BytesE4M3Fn; };
template <> struct As<DType::F8E5M2FNUZ> { using Format = Bytes<E5M2Fnuz>; };
template <> struct As<DType::F8E4M3FNUZ> { using Format = Bytes<E4M3Fnuz>; };
