// One-shot all-reduce of rows on sentinel slots, with residual and norm in the same kernel: every
// rank sends its whole input to every peer, adds all inputs in rank order, and normalises every
// row. For a tensor of S bytes each rank sends (n - 1) S bytes, in one trip over the link. A
// cluster handles each row, and each of its blocks has at least one group of the row.
#include "norm.cuh"

template <u32 K>
DEVICE void sum_and_norm(const NormArgs& args, const Share& share, SentinelSession& session) {
  // step 1: find this cluster's rows
  const u32 cluster = block() / cluster_blocks(), clusters = blocks() / cluster_blocks();
  const u64 first = part_begin(args.rows, cluster, clusters);
  const u32 count = (u32)(part_begin(args.rows, cluster + 1, clusters) - first);
  const auto own = [&](u32 row, u32 k, u32 p) {
    return load_of<K>(
        args.from + ((first + row) * row_units(args) + share.group(k) * PARTS + p) * 16);
  };
  // step 2: send this block's part of the rows to every peer
  for (u32 row = 0; row < count; ++row) {
    Unit v[K][PARTS];
#pragma unroll
    for (u32 k = 0; k < K; ++k) {
#pragma unroll
      for (u32 p = 0; p < PARTS; ++p) {
        if (share.has(k)) {
          v[k][p] = own(row, k, p);
        }
      }
    }
#pragma unroll
    for (u32 k = 0; k < K; ++k) {
#pragma unroll
      for (u32 p = 0; p < PARTS; ++p) {
        if (share.has(k)) {
          for_each_peer([&](u32 r) { session.send(0, r, share.place(row, k, p), scrub(v[k][p])); });
        }
      }
    }
  }
  allow_successor();
  wait_cluster();
  // step 3: receive each peer's units, add them in rank order, normalise row after row
  u32 turn = 0;
  for (u32 row = 0; row < count; ++row) {
    norm_row<K>(args, share, first + row, turn, [&](u32 k, u32 p) {
      return session.receive_reduce(0, share.place(row, k, p), own(row, k, p));
    });
  }
}

KERNEL(all_reduce_add_rms_norm_one_shot, NormArgs) {
  arrive_cluster();
  after_predecessor();
  SentinelSession session(args.common, args.sentinel);
  session.begin();
  const Share share(args);
  if (share.is_plain(args)) {
    sum_and_norm<1>(args, share, session);
  } else {
    sum_and_norm<MOST>(args, share, session);
  }
  session.end();
}
