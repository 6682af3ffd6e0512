// Signals between ranks, through words in the ranks' pads.
// A word that is 0 belongs to the sender, who makes it 1 in the receiver's pad; a word that is 1 belongs to the receiver, who makes it 0
// again. A thread serves one peer: it puts, or waits, or, in a barrier, does one after the other. What the stream did before a put is
// visible after the wait that takes it; docs/design/memory-model.md has the argument.
#include "peers.cuh"

// Most ranks of a group; src/coll/cuda/arguments.rs has the same.
#define MAX_PEERS 8

struct SignalArgs {
  // Pad of each rank, as mapped here.
  u32* pad[MAX_PEERS];
  // Word in host memory that is not 0 once the group has failed.
  const u32* stop;
  // Two words in host memory: the record of the signal that gave up first, and the milliseconds that it waited. Once the first is not 0,
  // all other signals end too.
  u32* report;
  // Nanoseconds that a thread waits, in all.
  u64 timeout;
  // Index of the slot's first word in a pad; the slot has one word for each rank that signals.
  u32 slot;
  // Record that is reported, together with a bit for each peer that has not come.
  u32 record;
  // Masks with a bit for each peer that is sent a signal, and for each whose signal is waited for.
  u32 put, wait;
};
static_assert(sizeof(SignalArgs) == 104 && WORLD <= MAX_PEERS, "");

enum class Step : u32 { PUT, WAIT, DONE, LATE, STOPPED };

// Looks at the clock and at the host's memory once in so many turns of 0.7 µs, or of two where the word is a peer's.
#define LOOK_EVERY 512u

KERNEL(signal, SignalArgs) {
  after_predecessor();
  // step 1: find this thread's peer, and the words of the two directions
  const u32 peer = thread();
  const bool puts = peer < WORLD && (args.put >> peer & 1) != 0;
  const bool waits = peer < WORLD && (args.wait >> peer & 1) != 0;
  u32* const out = puts ? args.pad[peer] + args.slot + RANK : nullptr;
  u32* const in = waits ? args.pad[RANK] + args.slot + peer : nullptr;
  Step step = puts ? Step::PUT : waits ? Step::WAIT : Step::DONE;
  // step 2: load the word that comes first; the load is on its way while the fence waits
  u32 seen = step == Step::DONE ? 0 : load_relaxed(puts ? out : in);
  // step 3: release what the stream did before, for the stores of all puts below
  fence_system();
  // step 4: put, wait, or put and then wait, until done, late or stopped
  u64 since = 0;
  for (u32 turn = 1; step == Step::PUT || step == Step::WAIT; turn++) {
    // One loop serves both: no thread's store waits until other threads have seen what they wait for.
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
  // step 5: acquire what peers did before their signals, for what the stream does next
  fence_system();
  if (sync_block_and(step != Step::LATE)) {
    return;
  }
  // step 6: report the peers that did not come
  u32 missing = 0;
  for_each_rank([&](u32 r) { missing |= sync_block_and(peer != r || step != Step::LATE) ? 0 : 1u << r; });
  // The first report stands. Its word is whole; the time may be another's, who reports within the same microsecond.
  if (peer == 0 && load_relaxed(args.report) == 0) {
    const u64 waited = args.timeout / 1000000;
    store_relaxed(args.report + 1, waited < 0xffffffff ? (u32)waited : 0xffffffffu);
    fence_system();
    store_relaxed(args.report, args.record | missing);
  }
}
