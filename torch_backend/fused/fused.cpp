// Checks of both operators, and what they tell the planner.
#include "fused/fused.hpp"

namespace symm {

void check_factors(const char* op, const char* left_name, const at::Tensor& left, const char* right_name, const at::Tensor& right) {
  const auto device = left.device();
  TORCH_CHECK_VALUE(left.dim() == 2, op, ": ", left_name, " must be a matrix, not a tensor of ", left.dim(), " dimensions");
  TORCH_CHECK_VALUE(right.dim() == 2, op, ": ", right_name, " must be a matrix, not a tensor of ", right.dim(), " dimensions");
  TORCH_CHECK_VALUE(left.is_contiguous(), op, ": ", left_name, " must be contiguous");
  TORCH_CHECK_VALUE(
      left.size(1) == right.size(0),
      op, ": ", left_name, " has ", left.size(1), " columns, ", right_name, " has ", right.size(0), " rows; they must be equally many");
  TORCH_CHECK_VALUE(
      left.scalar_type() == right.scalar_type(),
      op, ": ", left_name, " is of ", left.scalar_type(), ", ", right_name, " of ", right.scalar_type(), "; they must be of one dtype");
  TORCH_CHECK_VALUE(
      right.device() == device, op, ": ", left_name, " is on ", device, ", ", right_name, " on ", right.device());
  switch (left.scalar_type()) {
    case at::kBFloat16:
    case at::kHalf:
    case at::kFloat:
    case at::kDouble:
      break;
    default:
      TORCH_CHECK_VALUE(false, op, ": matrices of ", left.scalar_type(), " are not served; bfloat16, float16, float32 and float64 are");
  }
}

int32_t number_of(at::Device device) {
  return device.is_cpu() ? -1 : static_cast<int32_t>(device.index());
}

ProductSpec product_of(const Workspace& workspace, int64_t rows, int64_t columns, int64_t depth, at::ScalarType dtype) {
  return {
      .device = number_of(workspace.device()),
      .size = static_cast<size_t>(workspace.size()),
      .rank = static_cast<size_t>(workspace.rank()),
      .rows = static_cast<size_t>(rows),
      .columns = static_cast<size_t>(columns),
      .depth = static_cast<size_t>(depth),
      .dtype = static_cast<int32_t>(dtype),
  };
}

} // namespace symm
