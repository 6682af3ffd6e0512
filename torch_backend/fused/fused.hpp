// Fused matmuls as torch operators: torch.ops.symm._all_gather_matmul and _matmul_reduce_scatter.
// Each is one call that enqueues everything; docs/design/fused-matmul.md has the schedules.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>
#include <vector>

#include "fused/workspace.hpp"
#include "symm_mem/operators.hpp"
#include "symm/src/bridge/fused.rs.h"

namespace symm {

// Returns the rows of all ranks' `shard`, concatenated (empty without `return_gathered`), and their
// products with each of `factors`.
std::tuple<at::Tensor, std::vector<at::Tensor>> all_gather_matmul(
    const at::Tensor& shard,
    at::TensorList factors,
    const std::string& group_name,
    bool return_gathered);

// Returns this rank's rows of the sum over all ranks of `left` times `right`, or of their mean.
// Each rank rounds its product to the element type; the products are added in rank order in 32 bits
// (64-bit types in 64), and the sum is rounded once.
at::Tensor matmul_reduce_scatter(
    const at::Tensor& left, const at::Tensor& right, bool mean, const std::string& group_name);

// The results of both operators for tensors without memory, with the checks of the real call.
std::tuple<at::Tensor, std::vector<at::Tensor>> all_gather_matmul_shapes(
    const at::Tensor& shard,
    at::TensorList factors,
    const std::string& group_name,
    bool return_gathered);
at::Tensor matmul_reduce_scatter_shape(
    const at::Tensor& left,
    const at::Tensor& right,
    bool mean,
    const std::string& group_name);

// Throws unless `left` is a contiguous matrix on a supported device and `right` can be multiplied
// with it.
void check_factors(
    const char* op, const char* left_name, const at::Tensor& left, const char* right_name,
    const at::Tensor& right);

// Runs the `checks` of an operator's arguments. If they fail for tensors of the CPU, the ranks that
// wait for this one are notified.
template <typename Checks>
void check_on(at::Device device, const std::string& group_name, Checks checks) {
  if (device.is_cpu()) {
    check_arguments(group_name, checks);
  } else {
    checks();
  }
}

// Returns the number by which the Rust core knows the device; -1 is the CPU.
int32_t number_of(at::Device device);
// Describes the product of one rank's rows for the planner.
ProductSpec product_of(
    const Workspace& workspace, int64_t rows, int64_t columns, int64_t depth, at::ScalarType dtype);

} // namespace symm
