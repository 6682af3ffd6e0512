// Words of a call whose bytes copy engines move: how many steps each peer has sent and read. A step
// is one chunk of each message. Each word has one writer. Counts continue from call to call, so
// that a captured graph can be replayed: a call counts from `base`, and adds its number of steps to
// `base` at its end.
#pragma once
#include "wait.cuh"

struct CopyWords {
  // Last step whose chunk each rank has sent to this rank.
  u32 arrived[MAX_WORLD];
  // Last step whose chunk this rank may send to each rank.
  u32 credit[MAX_WORLD];
  // Number of steps of all earlier calls.
  u32 base;
};
// COPY_WORDS_BYTES in src/coll/cuda/workspace/layout.rs is the same.
static_assert(sizeof(CopyWords) == 132, "");
