// All-reduce, residual and RMSNorm in one: the tensors of the operators, and the checks of their
// arguments.
#include <torch/library.h>

#include "fused/norm.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include "fused/devices.hpp"
#include "gil.hpp"
#include "process_group/process_group.hpp"

namespace symm {

namespace {

constexpr const char* kNorm = "all_reduce_add_rms_norm";

// Rejects tensors whose shapes and types do not match; the core knows which ones it supports.
void check_norm(const at::Tensor& input, const at::Tensor& residual, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(input.dim() > 0, kNorm, ": input has no dimension; its last one is a row's");
  TORCH_CHECK_VALUE(
      residual.sym_sizes() == input.sym_sizes(), kNorm, ": residual is of sizes ",
      residual.sym_sizes(), ", input of ", input.sym_sizes(), "; they must be equal");
  TORCH_CHECK_VALUE(
      weight.dim() == 1 && weight.sym_size(0) == input.sym_size(-1), kNorm, ": weight is of sizes ",
      weight.sym_sizes(), ", a row of input has ", input.sym_size(-1), " elements");
  for (const auto& [name, tensor] :
       {std::pair("residual", &residual), std::pair("weight", &weight)}) {
    TORCH_CHECK_TYPE(
        tensor->scalar_type() == input.scalar_type(), kNorm, ": ", name, " is of ",
        tensor->scalar_type(), ", input of ", input.scalar_type(), "; they must be of one dtype");
    check_same_device(kNorm, name, *tensor, "input", input);
  }
}

void check_scale(const at::Tensor& scale, const at::Tensor& input) {
  check_same_device(kNorm, "scale", scale, "input", input);
  TORCH_CHECK_TYPE(
      scale.scalar_type() == at::kFloat, kNorm, ": scale is of ", scale.scalar_type(),
      "; it must be of float32");
  TORCH_CHECK_VALUE(
      scale.sym_numel() == 1, kNorm, ": scale has ", scale.sym_numel(),
      " elements; it must have one");
}

at::Tensor like(const at::Tensor& input, at::ScalarType dtype) {
  return at::empty_symint(input.sym_sizes(), input.options().dtype(dtype));
}

// Makes a tensor with a scale per row.
at::Tensor scales_of(const at::Tensor& input) {
  auto sizes = input.sym_sizes().vec();
  TORCH_CHECK_VALUE(!sizes.empty(), kNorm, ": input has no dimension; its last one is a row's");
  sizes.back() = 1;
  return at::empty_symint(sizes, input.options().dtype(at::kFloat));
}

void run_norm(const NormTensors& tensors, double eps, const std::string& group_name) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard guard(tensors.input.device());
  const auto backend = ProcessGroupSymm::named(group_name, tensors.input.device(), kNorm);
  without_gil([&] { backend->all_reduce_add_rms_norm(tensors, eps); });
}

// Returns the shapes of an operator's results, with the checks of the real call.
template <bool DYNAMIC>
auto norm_shapes(const at::Tensor& input, at::ScalarType dtype) {
  if constexpr (DYNAMIC) {
    return std::tuple(like(input, dtype), like(input, input.scalar_type()), scales_of(input));
  } else {
    return std::tuple(like(input, dtype), like(input, input.scalar_type()));
  }
}

} // namespace

std::tuple<at::Tensor, at::Tensor> all_reduce_add_rms_norm(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name) {
  auto results = norm_shapes<false>(input, input.scalar_type());
  run_norm(
      {input, residual, weight, {}, std::get<0>(results), std::get<1>(results), {}}, eps,
      group_name);
  return results;
}

void all_reduce_add_rms_norm_(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name) {
  run_norm({input, residual, weight, {}, input, residual, {}}, eps, group_name);
}

std::tuple<at::Tensor, at::Tensor> all_reduce_add_rms_norm_fp8(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const at::Tensor& scale,
    const std::string& group_name) {
  auto results = norm_shapes<false>(input, at::kFloat8_e4m3fn);
  run_norm(
      {input, residual, weight, scale, std::get<0>(results), std::get<1>(results), {}}, eps,
      group_name);
  return results;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> all_reduce_add_rms_norm_dynamic_fp8(
    const at::Tensor& input,
    const at::Tensor& residual,
    const at::Tensor& weight,
    double eps,
    const std::string& group_name) {
  auto results = norm_shapes<true>(input, at::kFloat8_e4m3fn);
  run_norm(
      {input,
       residual,
       weight,
       {},
       std::get<0>(results),
       std::get<1>(results),
       std::get<2>(results)},
      eps, group_name);
  return results;
}

void NormTensors::check() const {
  check_norm(input, residual, weight);
  if (scale.defined()) {
    check_scale(scale, input);
  }
}

void add_norm_shapes(torch::Library& library) {
  using Text = const std::string&;
  using In = const at::Tensor&;
  library.impl("all_reduce_add_rms_norm", [](In input, In residual, In weight, double, Text) {
    check_norm(input, residual, weight);
    return norm_shapes<false>(input, input.scalar_type());
  });
  library.impl("all_reduce_add_rms_norm_", [](In input, In residual, In weight, double, Text) {
    check_norm(input, residual, weight);
  });
  library.impl(
      "all_reduce_add_rms_norm_fp8", [](In input, In residual, In weight, double, In scale, Text) {
        check_norm(input, residual, weight);
        check_scale(scale, input);
        return norm_shapes<false>(input, at::kFloat8_e4m3fn);
      });
  library.impl(
      "all_reduce_add_rms_norm_dynamic_fp8", [](In input, In residual, In weight, double, Text) {
        check_norm(input, residual, weight);
        return norm_shapes<true>(input, at::kFloat8_e4m3fn);
      });
}

void refuse_gradients(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor()) {
      continue;
    }
    const auto& tensor = arguments[i].toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !c10::GradMode::is_enabled() || !tensor.requires_grad(),
        schema.name(), " is not differentiable, and ", schema.arguments()[i].name(),
        " requires a gradient; call it under torch.no_grad() or torch.inference_mode()");
    if (schema.is_mutable({c10::SchemaArgType::input, i})) {
      written.push_back(tensor);
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  for (const auto& tensor : written) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

} // namespace symm
