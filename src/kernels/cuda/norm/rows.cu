// Residual and norm of rows that have already been summed.
#include "norm.cuh"

template <u32 K>
DEVICE void norm_all(const NormArgs& args, const Share& share) {
  u32 turn = 0;
  for (u64 row = block(); row < args.rows; row += blocks()) {
    norm_row<K>(args, share, row, turn, [&](u32 k, u32 p) {
      return load_of<K>(args.from + (row * row_units(args) + share.group(k) * PARTS + p) * 16);
    });
  }
}

KERNEL(norm_rows, NormArgs) {
  after_predecessor();
  allow_successor();
  const Share share(args);
  if (share.is_plain(args)) {
    norm_all<1>(args, share);
  } else {
    norm_all<MOST>(args, share);
  }
}
