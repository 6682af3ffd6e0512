// Residual and norm of rows that have been summed already.
#include "norm.cuh"

KERNEL(norm_rows, NormArgs) {
  after_predecessor();
  allow_successor();
  u32 turn = 0;
  for (u64 row = block(); row < args.rows; row += blocks()) {
    const u8* const from = args.from + row * row_units(args) * 16;
    norm_row(args, row, turn, [&](u32 unit) { return load_unit(from + (u64)unit * 16, 16); });
  }
}
