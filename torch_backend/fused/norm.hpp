// All-reduce, residual and RMSNorm in one, as torch operators:
// torch.ops.symm.all_reduce_add_rms_norm and its variants.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <tuple>

namespace symm {

// Sums `input` over the ranks of the group and adds `residual`, which must be the same on all
// ranks, like `weight`. Returns the normed rows of the sum, and the sum.
// docs/design/all-reduce-norm.md describes the rounding.
std::tuple<at::Tensor, at::Tensor> all_reduce_add_rms_norm(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name);

// As all_reduce_add_rms_norm, but in place: `input` receives the normed rows, `residual` the sums.
void all_reduce_add_rms_norm_(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name);

// As all_reduce_add_rms_norm, but divides the normed rows by the single number `scale` and rounds
// them to float8_e4m3fn.
std::tuple<at::Tensor, at::Tensor> all_reduce_add_rms_norm_fp8(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const at::Tensor& scale,
    const std::string& group_name);

// As all_reduce_add_rms_norm_fp8, but divides each normed row by its own scale, so that its largest
// element becomes 448. Also returns the scales.
std::tuple<at::Tensor, at::Tensor, at::Tensor> all_reduce_add_rms_norm_dynamic_fp8(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name);

// Adds the operators for tensors without memory.
void add_norm_shapes(torch::Library& library);

// Rejects tensors that require gradients; otherwise calls the operator below autograd.
void refuse_gradients(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

} // namespace symm
