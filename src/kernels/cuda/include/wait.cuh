// Arguments that every kernel of a communicator has, and bounded waits: each ends when its
// condition holds, when the group fails, or at the timeout.
#pragma once
#include "peers.cuh"

// Maximum number of ranks of a group; `MAX_RANKS` in src/coll/cuda/workspace/layout.rs is the same.
#define MAX_WORLD 16

// Report of late ranks, in host memory. Threads that time out write it; the host reads it, and so
// do the other threads, which then end as well.
struct Report {
  u32 failed;
  u32 call_low, call_high;
  u32 waited_ms;
  // Entry r is not 0 if a thread reached its timeout while it waited for rank r.
  u32 missing[MAX_WORLD];
  // Counts of the zero-copy kernels: two for each channel, so that sends and receives have one
  // each.
  u32 direct[8];
};

// Arguments that every kernel of a communicator has.
struct Common {
  // Memory of this channel on every rank, as mapped in this process.
  u8* peer[MAX_WORLD];
  // Word in host memory that is not 0 once the group has failed.
  const u32* stop;
  Report* report;
  // Timeout of a thread within one call in nanoseconds.
  u64 timeout;
  // Number of the call in error messages.
  u64 call;
};
// src/coll/cuda/arguments.rs declares the same layouts, and checks the same sizes.
static_assert(sizeof(Common) == 160 && sizeof(Report) == 112, "");

// Offset in a channel of the word that is not 0 once a kernel of this rank has timed out on the
// channel; `FAILED` in src/coll/cuda/workspace/layout.rs is the same.
#define FAILED 768u

// Number of polls, each 0.3 to 0.7 µs, between two checks of the clock and the host's words. The
// checks of a whole kernel take 0.3 ms, because they cross the host's bus one by one. Peers wait
// for a kernel that its checks delay; if those waits led to checks as well, the kernels would keep
// delaying each other.
#define LOOK_EVERY (1u << 14)

// One thread's wait: when its clock started, its polls, and whether it has timed out. It exists so
// that every waiting loop of a kernel is bounded.
//
// A thread whose wait is over sends nothing, because a peer that arrives later would take it for
// valid data. The waits of all later kernels of the channel are over from the start: their counts
// and slots no longer match those of the peers.
struct Wait {
  const Common& common;
  u64 since = 0;
  u32 turns = 0;
  bool over;

  DEVICE explicit Wait(const Common& common)
      : common(common), over(load_relaxed(failed(common)) != 0) {}

  // Returns the word that is not 0 once a kernel of this rank has timed out on this channel.
  DEVICE static u32* failed(const Common& common) { return (u32*)(common.peer[RANK] + FAILED); }

  // Starts another wait with the full timeout, unless this one is over.
  DEVICE void restart() {
    since = 0;
    turns = 0;
  }

  // Returns true if the thread should poll again for data that the ranks in `missing` (a bit each)
  // have not sent. Once it has returned false it always does: the results of the call are then
  // invalid, and the host reports why.
  DEVICE bool look_again(u32 missing) {
    if (over) {
      return false;
    }
    if (++turns % LOOK_EVERY != 0) {
      return true;
    }
    // step 1: check the clock, the group's failure and other threads' reports
    const u64 now = clock_ns();
    if (since == 0) {
      since = now;
    }
    const u64 waited = now - since;
    const bool stopped = load_relaxed(common.stop) != 0;
    if (waited < common.timeout && !stopped && load_relaxed(&common.report->failed) == 0) {
      return true;
    }
    // step 2: time out, and report the missing ranks unless the group has already failed
    over = true;
    if (!stopped) {
      Report* report = common.report;
      // Not for_each_rank, which unrolls: this loop runs at most once, and unrolling it cost every
      // kernel 2 to 6 registers.
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
    }
    // step 3: end the waits of later kernels, after the report: none of them may end without one
    fence_system();
    store_relaxed(failed(common), 1u);
    return false;
  }
};
