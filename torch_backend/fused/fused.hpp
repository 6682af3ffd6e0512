// Matrix products fused with collectives, as operators of torch: torch.ops.symm._all_gather_matmul and _matmul_reduce_scatter. Each is one
// call that enqueues everything; docs/design/fused-products.md has the schedules.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>
#include <vector>

#include "fused/workspace.hpp"
#include "symm/src/bridge/fused.rs.h"

namespace symm {

// The rows of `shard` of all ranks, one below the other (empty without `return_gathered`), and its products with each of `factors`.
std::tuple<at::Tensor, std::vector<at::Tensor>> all_gather_matmul(
    const at::Tensor& shard,
    at::TensorList factors,
    const std::string& group_name,
    bool return_gathered);

// Returns this rank's rows of the sum over all ranks of `left` times `right`, or of their mean. Each rank's product is rounded to its
// element type; those are added up in the order of the ranks in 32 bits (64 for those of 64), and the sum is rounded once.
at::Tensor matmul_reduce_scatter(const at::Tensor& left, const at::Tensor& right, bool mean, const std::string& group_name);

// The results of both operators for tensors without memory. The checks are those of the real call.
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

// Throws unless `left` is a contiguous matrix on a device that is served and `right` one that can be multiplied with it.
void check_factors(const char* op, const char* left_name, const at::Tensor& left, const char* right_name, const at::Tensor& right);

// The device's number in the core.
int32_t number_of(at::Device device);
// The product of one rank's rows, as the planner knows it.
ProductSpec product_of(const Workspace& workspace, int64_t rows, int64_t columns, int64_t depth, at::ScalarType dtype);

} // namespace symm
