// Synchronization of the ranks around copies by copy engines. In one warp, thread r posts to rank r
// how far this rank is, and waits until rank r is far enough. The copies before this kernel in the
// stream are complete, and what peers did before they posted is visible to the stream's later work.
#include "copy_words.cuh"

struct CopySyncArgs {
  Common common;
  // Offset in the channel of the words.
  u64 words;
  // Steps that are posted to all peers, and steps for which the warp waits; 0: none.
  u32 post_arrived, post_credit;
  u32 wait_arrived, wait_credit;
  // Number of steps of a call, at its end; otherwise 0.
  u32 advance;
  // Not 0 if the steps publish no data: they need no order then, and the next kernel may be set up
  // as soon as the warp has waited.
  u32 bare;
};
static_assert(sizeof(CopySyncArgs) == 192, "");

KERNEL(copy_sync, CopySyncArgs) {
  after_predecessor();
  CopyWords* const own = (CopyWords*)(args.common.peer[RANK] + args.words);
  const u32 base = load_relaxed(&own->base);
  const u32 r = thread();
  Wait wait(args.common);
  if (r < WORLD && r != RANK) {
    CopyWords* const peer = (CopyWords*)(args.common.peer[r] + args.words);
    // step 1: release the stream's earlier work, and post; after a timeout post nothing, because
    // copies have run that should have waited
    if (args.bare == 0) {
      fence_system();
    }
    if (args.post_arrived != 0 && !wait.over) {
      store_relaxed(&peer->arrived[RANK], base + args.post_arrived);
    }
    if (args.post_credit != 0 && !wait.over) {
      store_relaxed(&peer->credit[RANK], base + args.post_credit);
    }
    // step 2: wait for rank r
    if (args.wait_arrived != 0) {
      while (!reached(load_acquire(&own->arrived[r]), base + args.wait_arrived) &&
             wait.look_again(1u << r)) {
      }
    }
    if (args.wait_credit != 0) {
      while (!reached(load_acquire(&own->credit[r]), base + args.wait_credit) &&
             wait.look_again(1u << r)) {
      }
    }
    if (args.bare == 0) {
      fence_system();
    }
  }
  // step 3: count the call's steps. All threads meet first, because a thread that waits for no rank
  // would allow the successor for the whole block.
  sync_block();
  if (args.bare != 0) {
    allow_successor();
  }
  if (r == 0 && args.advance != 0) {
    store_relaxed(&own->base, base + args.advance);
  }
}
