// Signals between ranks, through words in the ranks' pads. A word of 0 belongs to the sender, which
// sets it to 1 in the receiver's pad; a word of 1 belongs to the receiver, which sets it to 0
// again. Each thread handles one peer: it puts, or it waits, or, in a barrier, it puts and then
// waits. Work that the stream did before a put is visible after the wait that takes it: the fence
// before the put pairs with the fence after the wait (docs/design/memory-model.md).
#include "peers.cuh"

// Maximum number of ranks of a group that signals; `MAX_PEERS` in src/coll/cuda/arguments.rs is the
// same.
#define MAX_PEERS 8

struct SignalArgs {
  // Pad of each rank, as mapped in this process.
  u32* pad[MAX_PEERS];
  // Word in host memory that is not 0 once the group has failed.
  const u32* stop;
  // Two words in host memory: the record of the first signal that timed out, and the milliseconds
  // that it waited. Once the first word is not 0, all other signals end as well.
  u32* report;
  // Total timeout of a thread in nanoseconds.
  u64 timeout;
  // Index of the slot's first word in a pad; the slot has one word for each rank that signals.
  u32 slot;
  // The record of a timeout; the kernel adds a bit for each missing peer.
  u32 record;
  // A bit for each peer to which this rank puts, and for each peer for whose signal it waits.
  u32 put, wait;
};
static_assert(sizeof(SignalArgs) == 104 && WORLD <= MAX_PEERS, "");

enum class Step : u32 { PUT, WAIT, DONE, LATE, STOPPED };

// A thread checks the clock and the host's words once in this many polls, which take 0.7 µs each,
// or twice that for a word in a peer's memory.
#define LOOK_EVERY 512u

KERNEL(signal, SignalArgs) {
  after_predecessor();
  // step 1: find this thread's peer, and its words in both directions
  const u32 peer = thread();
  const bool puts = peer < WORLD && (args.put >> peer & 1) != 0;
  const bool waits = peer < WORLD && (args.wait >> peer & 1) != 0;
  u32* const out = puts ? args.pad[peer] + args.slot + RANK : nullptr;
  u32* const in = waits ? args.pad[RANK] + args.slot + peer : nullptr;
  Step step = puts ? Step::PUT : waits ? Step::WAIT : Step::DONE;
  // step 2: load the word that this thread polls first; the load is in flight while the fence waits
  u32 seen = step == Step::DONE ? 0 : load_relaxed(puts ? out : in);
  // step 3: release the stream's earlier work, for the stores of all puts below
  fence_system();
  // step 4: put, wait, or put and then wait, until done, late or stopped
  u64 since = 0;
  for (u32 turn = 1; step == Step::PUT || step == Step::WAIT; turn++) {
    // One loop puts and waits, so that no thread's store waits until other threads of the warp have
    // seen their words.
    if (step == Step::PUT && seen == 0) {
      store_relaxed(out, 1u);
      step = waits ? Step::WAIT : Step::DONE;
    } else if (step == Step::WAIT && seen == 1) {
      store_relaxed(in, 0u);
      step = Step::DONE;
    } else if (turn % LOOK_EVERY == 0) {
      const u64 now = clock_ns();
      since = since == 0 ? now : since;
      if (load_relaxed(args.stop) != 0 || load_relaxed(args.report) != 0) {
        step = Step::STOPPED;
      } else if (now - since >= args.timeout) {
        step = Step::LATE;
      }
    }
    if (step == Step::PUT || step == Step::WAIT) {
      seen = load_relaxed(step == Step::PUT ? out : in);
    }
  }
  // step 5: acquire the work that peers did before their signals, for the stream's later work
  fence_system();
  if (sync_block_and(step != Step::LATE)) {
    return;
  }
  // step 6: report the missing peers
  u32 missing = 0;
  for_each_rank(
      [&](u32 r) { missing |= sync_block_and(peer != r || step != Step::LATE) ? 0 : 1u << r; });
  // The first report stays. Its first word comes from one kernel; the milliseconds may come from
  // another kernel that reports within the same microsecond.
  if (peer == 0 && load_relaxed(args.report) == 0) {
    const u64 waited = args.timeout / 1000000;
    store_relaxed(args.report + 1, waited < 0xffffffff ? (u32)waited : 0xffffffffu);
    fence_system();
    store_relaxed(args.report, args.record | missing);
  }
}
