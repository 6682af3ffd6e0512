// Synchronization of the two ends of a long message. One thread posts to the other end how far this
// rank is, and waits until the other end is far enough. The copies before this kernel in the stream
// are complete, and what the other end did before it posted is visible to the stream's later work.
#include "copy_words.cuh"

struct MessageSyncArgs {
  Common common;
  // Offsets in the channel of this end's `MessageWords`, and of the other end's.
  u64 own, other;
  // The rank at the other end.
  u32 rank;
  // Step that is posted, and step for which the thread waits; 0: none.
  u32 post, wait;
  // Number of steps of a message, at its end; otherwise 0.
  u32 advance;
  // Not 0 if the step publishes no data, as in CopySyncArgs.
  u32 bare;
};
static_assert(sizeof(MessageSyncArgs) == 200, "");

KERNEL(message_sync, MessageSyncArgs) {
  if (thread() != 0) {
    return;
  }
  after_predecessor();
  MessageWords* const own = (MessageWords*)(args.common.peer[RANK] + args.own);
  MessageWords* const other = (MessageWords*)(args.common.peer[args.rank] + args.other);
  const u32 base = load_relaxed(&own->base[args.rank]);
  Wait wait(args.common);
  // step 1: release the stream's earlier work, and post; after a timeout post nothing, because
  // copies have run that should have waited
  if (args.bare == 0) {
    fence_system();
  }
  if (args.post != 0 && !wait.over) {
    store_relaxed(&other->posted[RANK], base + args.post);
  }
  // step 2: wait for the other end
  if (args.wait != 0) {
    while (!reached(load_acquire(&own->posted[args.rank]), base + args.wait) &&
           wait.look_again(1u << args.rank)) {
    }
  }
  // If the group has failed meanwhile, the other end may have given up, and its tensor may have
  // another use: the later kernels store and post nothing.
  if (args.bare != 0) {
    allow_successor();
  } else {
    if (args.wait != 0 && load_relaxed(args.common.stop) != 0) {
      store_relaxed(Wait::failed(args.common), 1u);
    }
    fence_system();
  }
  // step 3: count the message's steps
  if (args.advance != 0) {
    store_relaxed(&own->base[args.rank], base + args.advance);
  }
}
