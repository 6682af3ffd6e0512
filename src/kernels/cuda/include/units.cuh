// Loads and stores of units in tensors of any alignment and any length.
#pragma once
#include "device.cuh"

template <typename Word>
DEVICE Unit load_words(const u8* from, u64 bytes) {
  constexpr u32 PER = 4 / sizeof(Word);
  u32 words[4];
#pragma unroll
  for (u32 w = 0; w < 4; ++w) {
    words[w] = 0;
#pragma unroll
    for (u32 i = 0; i < PER; ++i) {
      const u32 at = w * 4 + i * (u32)sizeof(Word);
      if (at < bytes) {
        words[w] |= (u32) * (const Word*)(from + at) << (i * 8 * sizeof(Word) % 32);
      }
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

template <typename Word>
DEVICE void store_words(u8* to, Unit unit, u64 bytes) {
  constexpr u32 PER = 4 / sizeof(Word);
  const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (u32 w = 0; w < 4; ++w) {
#pragma unroll
    for (u32 i = 0; i < PER; ++i) {
      const u32 at = w * 4 + i * (u32)sizeof(Word);
      if (at < bytes) {
        *(Word*)(to + at) = (Word)(words[w] >> (i * 8 * sizeof(Word) % 32));
      }
    }
  }
}

// Returns a number whose low bits are 0 to the extent that the address and, below a full unit, the
// length are aligned.
DEVICE u32 alignment(const u8* at, u64 bytes) {
  return (u32)((u64)at | (bytes < 16 ? bytes : 0));
}

// Loads the unit at `from`, whose first `bytes` bytes (16 or more: all) belong to the tensor; the
// rest is 0.
DEVICE Unit load_unit(const u8* from, u64 bytes) {
  const u32 low = alignment(from, bytes);
  if (bytes >= 16 && low % 16 == 0) {
    return *(const Unit*)from;
  }
  return low % 4 == 0   ? load_words<u32>(from, bytes)
         : low % 2 == 0 ? load_words<u16>(from, bytes)
                        : load_words<u8>(from, bytes);
}

// Stores the first `bytes` of a unit (16 or more: all of it) at `to`.
DEVICE void store_unit(u8* to, Unit unit, u64 bytes) {
  const u32 low = alignment(to, bytes);
  if (bytes >= 16 && low % 16 == 0) {
    *(Unit*)to = unit;
  } else if (low % 4 == 0) {
    store_words<u32>(to, unit, bytes);
  } else if (low % 2 == 0) {
    store_words<u16>(to, unit, bytes);
  } else {
    store_words<u8>(to, unit, bytes);
  }
}

DEVICE u64 units_of(u64 bytes) {
  return (bytes + 15) / 16;
}
DEVICE u32 quotient_up(u32 a, u32 b) {
  return (a + b - 1) / b;
}
DEVICE u64 smaller(u64 a, u64 b) {
  return a < b ? a : b;
}
DEVICE u64 larger(u64 a, u64 b) {
  return a > b ? a : b;
}
DEVICE u32 larger(u32 a, u32 b) {
  return a > b ? a : b;
}

// Number of units that a thread moves at once if it loads from one message at a time.
#define ALONE_AT_ONCE 4u

// Calls `move(u, at)` for each of the units i, i + step, … below `units` that a thread moves at
// once: `at` is the unit, `u` its number among these.
template <typename At, typename Move>
DEVICE void for_each_unit(At i, At units, At step, Move move) {
#pragma unroll
  for (u32 u = 0; u < ALONE_AT_ONCE; ++u) {
    const At at = i + u * step;
    if (at < units) {
      move(u, at);
    }
  }
}

// Moves the units first, first + step, … below `units`: loads several with `load(at)`, then calls
// `store(at, v)` for each.
template <typename At, typename Load, typename Store>
DEVICE void move_units(At first, At units, At step, Load load, Store store) {
  for (At i = first; i < units; i += step * ALONE_AT_ONCE) {
    Unit v[ALONE_AT_ONCE];
    for_each_unit(i, units, step, [&](u32 u, At at) { v[u] = load(at); });
    for_each_unit(i, units, step, [&](u32 u, At at) { store(at, v[u]); });
  }
}
