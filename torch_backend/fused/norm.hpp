// All-reduce, residual and RMSNorm in one, as operators of torch: torch.ops.symm.all_reduce_add_rms_norm and its other forms.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <tuple>

namespace symm {

// Sums `input` over the ranks of the group and adds `residual`, which is alike on all ranks, as is `weight`. Returns the rows of that,
// normed, and that itself. docs/design/all-reduce-norm.md says where it rounds.
std::tuple<at::Tensor, at::Tensor> all_reduce_add_rms_norm(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name);

// The same in place: the normed rows are in `input`, the sums in `residual`.
void all_reduce_add_rms_norm_(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name);

// The same, of which the normed rows are divided by `scale`, one number, and rounded to float8_e4m3fn.
std::tuple<at::Tensor, at::Tensor> all_reduce_add_rms_norm_fp8(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const at::Tensor& scale,
    const std::string& group_name);

// The same, of which each normed row is divided by a scale of its own, so that its largest element becomes 448. Returns the scales, too.
std::tuple<at::Tensor, at::Tensor, at::Tensor> all_reduce_add_rms_norm_dynamic_fp8(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name);

// What the operators return for tensors without memory.
void add_norm_shapes(torch::Library& library);

// Refuses tensors that want gradients; else goes on below autograd.
void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

} // namespace symm
