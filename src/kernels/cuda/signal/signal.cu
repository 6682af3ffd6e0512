// Signals between ranks, through words that the ranks' pads hold: a word that is 0 is the sender's, who makes it 1 in the receiver's pad;
// a word that is 1 is the receiver's, who makes it 0 again. A lane has one peer: it puts, or waits, or, in a barrier, one after the other.
// What the stream did before a put is visible after the wait that takes it; docs/design/memory-model.md has the argument.
#include "device.cuh"

// Ranks of a group, at most; src/coll/cuda/arguments.rs has the same.
#define MAX_PEERS 8

struct SignalArgs {
  // Of each rank, as mapped here.
  u32* pad[MAX_PEERS];
  // In host memory; not 0: the group has failed.
  const u32* stop;
  // In host memory: who has not come, and the milliseconds that were waited. Not 0: some signal has given up, all others may.
  u32* report;
  // Nanoseconds that a lane waits, in all.
  u64 timeout;
  // The first of the channel's words in a pad: one for each rank that signals.
  u32 channel;
  // What is reported, together with a bit for each peer that has not come.
  u32 record;
  // A bit for each peer that is sent a signal, and for each whose signal is waited for.
  u32 put, wait;
};
static_assert(sizeof(SignalArgs) == 104 && WORLD <= MAX_PEERS, "");

enum class Step : u32 { PUT, WAIT, DONE, LATE, STOPPED };

// Looks at the clock and at the host's memory once in so many turns of 0.7 µs, or of two where the word is a peer's.
#define LOOK_EVERY 512u

KERNEL(signal, SignalArgs) {
  after_predecessor();
  const u32 lane = thread();
  const bool puts = lane < WORLD && (args.put >> lane & 1) != 0;
  const bool waits = lane < WORLD && (args.wait >> lane & 1) != 0;
  u32* const out = puts ? args.pad[lane] + args.channel + RANK : nullptr;
  u32* const in = waits ? args.pad[RANK] + args.channel + lane : nullptr;
  Step step = puts ? Step::PUT : waits ? Step::WAIT : Step::DONE;
  // The first look at a peer's word is on its way while the fence waits.
  u32 seen = step == Step::DONE ? 0 : load_relaxed(puts ? out : in);
  // Releases, for the stores of all puts below.
  fence_system();
  u64 since = 0;
  for (u32 turn = 1; step == Step::PUT || step == Step::WAIT; turn++) {
    // All within one loop: no lane's store waits until other lanes have seen what they wait for.
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
  // Acquires, for what the stream does next.
  fence_system();
  if (sync_block_and(step != Step::LATE)) {
    return;
  }
  u32 missing = 0;
  for (u32 r = 0; r < WORLD; ++r) {
    missing |= sync_block_and(lane != r || step != Step::LATE) ? 0 : 1u << r;
  }
  // The first stands. Its word is whole; of two in the same microsecond the time may be the other's.
  if (lane == 0 && load_relaxed(args.report) == 0) {
    const u64 waited = args.timeout / 1000000;
    store_relaxed(args.report + 1, waited < 0xffffffff ? (u32)waited : 0xffffffffu);
    fence_system();
    store_relaxed(args.report, args.record | missing);
  }
}
