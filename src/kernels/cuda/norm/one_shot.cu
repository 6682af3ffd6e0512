// One-shot all-reduce of rows on sentinel slots, with residual and norm in the same kernel: every rank sends its whole input to every peer,
// adds up all inputs in rank order, and norms every row. Each rank sends (n - 1) S in one trip over the link.
#include "norm.cuh"

KERNEL(all_reduce_add_rms_norm_one_shot, NormArgs) {
  after_predecessor();
  // step 1: find this block's rows
  SentinelSession session(args.common, args.sentinel);
  session.begin();
  const u64 first = part_begin(args.rows, block(), blocks());
  const u32 count = (u32)(part_begin(args.rows, block() + 1, blocks()) - first);
  const u32 units = row_units(args);
  const u8* const from = args.from + first * units * 16;
  // step 2: send the rows to every peer
  for (u32 i = thread(); i < count * units; i += threads()) {
    const Unit v = scrub(load_unit(from + (u64)i * 16, 16));
    for_each_peer([&](u32 r) { session.send(0, r, i, v); });
  }
  allow_successor();
  // step 3: receive each peer's units, add up in rank order, norm row after row
  u32 turn = 0;
  for (u32 row = 0; row < count; ++row) {
    norm_row(args, first + row, turn, [&](u32 unit) {
      const u32 i = row * units + unit;
      return session.receive_reduce(0, i, load_unit(from + (u64)i * 16, 16));
    });
  }
  // step 4: end the epoch
  session.end();
}
