// The sum of one unit of every rank, read from slots.
#pragma once
#include "bytes.cuh"
#include "types.cuh"

DEVICE Unit sum_of(const Unit* const (&slot)[WORLD], u32 unit, Unit own, double factor) {
  Unit v[WORLD];
#pragma unroll
  for (u32 k = 1; k < WORLD; ++k) {
    const u32 r = (RANK + k) % WORLD;
    v[r] = slot[r][unit];
  }
  v[RANK] = lift(own, factor);
  Sum sum;
  begin(sum, v[0]);
#pragma unroll
  for (u32 r = 1; r < WORLD; ++r) {
    combine(sum, v[r]);
  }
  return finish(sum);
}
