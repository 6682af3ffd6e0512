// Arguments that every kernel has of its group, and waits that end: by what is waited for, by the group's failure or by the clock.
#pragma once
#include "peers.cuh"

// Most ranks of a group; src/coll/cuda/arguments.rs has the same.
#define MAX_WORLD 16

// Report of late ranks, in host memory. Threads whose time ran out write it; the host and the other threads, which end then too, read it.
struct Report {
  u32 failed;
  u32 call_low, call_high;
  u32 waited_ms;
  // Flags that are not 0 for a rank that was waited for.
  u32 missing[MAX_WORLD];
  // Counts of the kernels that moved something between tensors without staging: two for each channel, of which sends and receives have one
  // each.
  u32 direct[8];
};

// Arguments that every kernel of a communicator has.
struct Common {
  // Memory of this channel on every rank, as mapped here.
  u8* peer[MAX_WORLD];
  // Word in host memory that is not 0 once the group has failed.
  const u32* stop;
  Report* report;
  // Nanoseconds that a thread waits within one call.
  u64 timeout;
  // Number of the call in error messages.
  u64 call;
};
// src/coll/cuda/arguments.rs lays these out too, and checks the same sizes.
static_assert(sizeof(Common) == 160 && sizeof(Report) == 112, "");

// Turns of 0.3 to 0.7 µs from one look at the clock and at the host's memory to the next. The looks of a whole kernel take 0.3 ms, as they
// cross the host's bus one by one. Peers wait for a kernel that is held up by them: if that made them look as well, each would hold up the
// other from then on.
#define LOOK_EVERY (1u << 14)

// One thread's wait: when its clock began, its turns, and whether it gave up.
struct Wait {
  const Common& common;
  u64 since = 0;
  u32 turns = 0;
  bool over = false;

  DEVICE explicit Wait(const Common& common) : common(common) {}

  // Begins another wait, with the whole time before it.
  DEVICE void restart() {
    since = 0;
    turns = 0;
    over = false;
  }

  // Says whether to look again for what the ranks in `missing` (a bit each) have not sent. Once it said no it says so for good: the results
  // of the call are worthless then, and the host says why.
  DEVICE bool look_again(u32 missing) {
    if (over) {
      return false;
    }
    if (++turns % LOOK_EVERY != 0) {
      return true;
    }
    // step 1: look at the clock, at the group's failure and at other threads' reports
    const u64 now = clock_ns();
    if (since == 0) {
      since = now;
    }
    const u64 waited = now - since;
    const bool stopped = load_relaxed(common.stop) != 0;
    if (waited < common.timeout && !stopped && load_relaxed(&common.report->failed) == 0) {
      return true;
    }
    // step 2: give up, and report the missing ranks unless the group has failed already
    over = true;
    Report* report = common.report;
    if (stopped) {
      return false;
    }
    // Not for_each_rank: this runs once at most, and took every kernel 2 to 6 registers.
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
};
