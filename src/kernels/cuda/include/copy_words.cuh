// Words of a call whose bytes copy engines move: how many steps each peer has sent and read. A step
// is one chunk of each message. Each word has one writer. Counts continue from call to call, so
// that a captured graph can be replayed: a call counts from `base`, and adds its number of steps to
// `base` at its end. Other words of this kind count the arrivals at calls whose kernels have lanes:
// one step for each call.
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

// Words of one end of the long messages between two ranks; a rank has two sets, one for the
// messages that it sends and one for those that it receives. Steps count as above, but for each
// pair of ranks: only the two ends know of a message.
struct MessageWords {
  // Last step that the other end, a rank each, has posted.
  u32 posted[MAX_WORLD];
  // Number of steps of all earlier messages.
  u32 base[MAX_WORLD];
};
static_assert(sizeof(MessageWords) == 128, "");
// Number of steps of a message that a kernel moves; `STEPS` in src/coll/cuda/copy_engine/message.rs
// is the same.
#define MESSAGE_STEPS 2u

// Returns true if `count`, which may have wrapped, has reached `target`.
DEVICE bool reached(u32 count, u32 target) {
  return (u32)(count - target) < 1u << 31;
}

// Announces to all peers that this rank has arrived at the call: a peer may wait for that before it
// starts a kernel with many blocks. One thread of the kernel announces; `words` is the offset of
// the words in the channel, or 0 if a kernel before this one has done so.
DEVICE void announce_arrival(const Common& common, u32 words) {
  if (words == 0 || block() != 0 || thread() != 0) {
    return;
  }
  const auto words_of = [&](u32 r) { return (CopyWords*)(common.peer[r] + words); };
  const u32 step = load_relaxed(&words_of(RANK)->base) + 1;
  // After a timeout nothing is posted, as by copy_sync.
  if (load_relaxed(Wait::failed(common)) == 0) {
    for_each_peer([&](u32 r) { store_relaxed(&words_of(r)->arrived[RANK], step); });
  }
  store_relaxed(&words_of(RANK)->base, step);
}

// Announces to the other ends of the messages with `ranks`, a bit each, that this rank has arrived,
// and counts the messages' steps. One block calls this; `own` and `other` are the offsets of the
// two ends' `MessageWords`.
DEVICE void announce_messages(const Common& common, u32 own, u32 other, u32 ranks) {
  const u32 r = thread();
  if (r < WORLD && (ranks >> r & 1)) {
    u32* const base = &((MessageWords*)(common.peer[RANK] + own))->base[r];
    const u32 step = load_relaxed(base) + MESSAGE_STEPS;
    // After a timeout nothing is posted, as by message_sync.
    if (load_relaxed(Wait::failed(common)) == 0) {
      store_relaxed(&((MessageWords*)(common.peer[r] + other))->posted[RANK], step);
    }
    store_relaxed(base, step);
  }
}
