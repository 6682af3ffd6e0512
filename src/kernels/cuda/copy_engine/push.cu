// Copy of this rank's message to a peer's tensor. A copy engine would also copy after a timeout,
// when the peer may not have arrived and its tensor's memory may still have another use; this
// kernel stores nothing then.
#include "units.cuh"
#include "wait.cuh"

struct CopyPushArgs {
  Common common;
  const u8* from;
  u8* to;
  u64 bytes;
};
static_assert(sizeof(CopyPushArgs) == 184, "");

KERNEL(copy_push, CopyPushArgs) {
  after_predecessor();
  if (Wait(args.common).over) {
    return;
  }
  const u64 units = units_of(args.bytes);
  for (u64 i = (u64)block() * threads() + thread(); i < units; i += (u64)blocks() * threads()) {
    const u64 at = i * 16;
    store_unit(args.to + at, load_unit(args.from + at, args.bytes - at), args.bytes - at);
  }
}
