// What every kernel is told of its group, and waiting that ends: by what is waited for, by the group's failure or by the clock.
#pragma once
#include "device.cuh"

// Ranks of a group, at most; src/coll/cuda/arguments.rs has the same.
#define MAX_WORLD 16

// In host memory, written by the threads whose time ran out, read by the host and by the other threads, which end then too.
struct Report {
  u32 failed;
  u32 call_low, call_high;
  u32 waited_ms;
  // Not 0 for a rank that was waited for.
  u32 missing[MAX_WORLD];
  // Of each channel: kernels that moved something between tensors without staging.
  u32 direct[4];
};

struct Common {
  // This channel's memory on every rank, as mapped here.
  u8* peer[MAX_WORLD];
  // In host memory; not 0: the group has failed.
  const u32* stop;
  Report* report;
  // Nanoseconds that a thread waits within one call.
  u64 timeout;
  // The call's number in messages.
  u64 call;
};
// src/coll/cuda/arguments.rs lays these out too, and checks the same sizes.
static_assert(sizeof(Common) == 160 && sizeof(Report) == 96, "");

struct Wait {
  u64 since = 0;
  u32 turns = 0;
  bool over = false;
};

// Looks at the clock and at the host's memory once in so many turns of 0.3 to 0.7 µs. Those of a whole kernel take 0.3 ms, as they cross the
// host's bus one by one. Peers wait for a kernel that is held up by that: if that made them look as well, each would hold up the other from
// then on.
#define LOOK_EVERY (1u << 14)

// Whether to look again for what the ranks in `missing` (a bit each) have not sent. Once it said no it says so for good: the results
// of the call are worthless then, and the host says why.
DEVICE bool keep_waiting(Wait& wait, const Common& common, u32 missing) {
  if (wait.over) {
    return false;
  }
  if (++wait.turns % LOOK_EVERY != 0) {
    return true;
  }
  const u64 now = clock_ns();
  if (wait.since == 0) {
    wait.since = now;
  }
  const u64 waited = now - wait.since;
  const bool stopped = load_relaxed(common.stop) != 0;
  if (waited < common.timeout && !stopped && load_relaxed(&common.report->failed) == 0) {
    return true;
  }
  wait.over = true;
  Report* report = common.report;
  if (stopped) {
    return false;
  }
  for (u32 r = 0; r < WORLD; ++r) {
    if (missing >> r & 1) {
      store_relaxed(&report->missing[r], 1u);
    }
  }
  store_relaxed(&report->call_low, (u32)common.call);
  store_relaxed(&report->call_high, (u32)(common.call >> 32));
  store_relaxed(&report->waited_ms, (u32)(waited / 1000000));
  fence_system();
  store_relaxed(&report->failed, 1u);
  return false;
}
