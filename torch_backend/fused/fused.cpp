// The argument checks of both fused matmuls, and the descriptions that they pass to the planner.
#include "fused/fused.hpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "fused/devices.hpp"

namespace symm {

void check_factors(
    const char* op, const char* left_name, const at::Tensor& left, const char* right_name,
    const at::Tensor& right) {
  TORCH_CHECK_VALUE(
      left.dim() == 2, op, ": ", left_name, " must be a matrix, not a tensor of ", left.dim(),
      " dimensions");
  TORCH_CHECK_VALUE(
      right.dim() == 2, op, ": ", right_name, " must be a matrix, not a tensor of ", right.dim(),
      " dimensions");
  TORCH_CHECK_VALUE(left.is_contiguous(), op, ": ", left_name, " must be contiguous");
  TORCH_CHECK_VALUE(
      left.sym_size(1) == right.sym_size(0), op, ": ", left_name, " has ", left.sym_size(1),
      " columns, ", right_name, " has ", right.sym_size(0), " rows; they must be equally many");
  TORCH_CHECK_VALUE(
      left.scalar_type() == right.scalar_type(), op, ": ", left_name, " is of ", left.scalar_type(),
      ", ", right_name, " of ", right.scalar_type(), "; they must be of one dtype");
  check_same_device(op, right_name, right, left_name, left);
  switch (left.scalar_type()) {
    case at::kBFloat16:
    case at::kHalf:
    case at::kFloat:
    case at::kDouble:
      break;
    default:
      TORCH_CHECK_VALUE(
          false, op, ": matrices of ", left.scalar_type(),
          " are not served; bfloat16, float16, float32 and float64 are");
  }
}

std::tuple<at::Tensor, std::vector<at::Tensor>> all_gather_matmul_shapes(
    const at::Tensor& shard,
    at::TensorList factors,
    const std::string& group_name,
    bool return_gathered) {
  constexpr auto op = "_all_gather_matmul";
  TORCH_CHECK_VALUE(!factors.empty(), op, ": Bs is empty");
  const auto rows = shard.sym_size(0) * ::c10d::resolve_process_group(group_name)->getSize();
  std::vector<at::Tensor> outputs;
  for (const auto& factor : factors) {
    check_factors(op, "A_shard", shard, "B", factor);
    outputs.push_back(at::empty_symint({rows, factor.sym_size(1)}, shard.options()));
  }
  auto gathered = return_gathered ? at::empty_symint({rows, shard.sym_size(1)}, shard.options())
                                  : at::empty({0}, shard.options());
  return {std::move(gathered), std::move(outputs)};
}

at::Tensor matmul_reduce_scatter_shape(
    const at::Tensor& left,
    const at::Tensor& right,
    bool /*mean*/,
    const std::string& group_name) {
  constexpr auto op = "_matmul_reduce_scatter";
  check_factors(op, "A", left, "B", right);
  const c10::SymInt ranks(::c10d::resolve_process_group(group_name)->getSize());
  TORCH_CHECK_VALUE(
      left.sym_size(0) % ranks == 0, op, ": the ", left.sym_size(0),
      " rows of A cannot be divided among ", ranks,
      " ranks; the number of rows must be a multiple");
  return at::empty_symint({left.sym_size(0) / ranks, right.sym_size(1)}, left.options());
}

int32_t number_of(at::Device device) {
  return device.is_cpu() ? -1 : static_cast<int32_t>(device.index());
}

ProductSpec product_of(
    const Workspace& workspace, int64_t rows, int64_t columns, int64_t depth,
    at::ScalarType dtype) {
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
