// The operators' schemas and registrations, including those for tensors without memory (Meta).
// Python calls the operators through torch.ops.symm. The registrations are in this file because the
// linker drops files to which nothing refers.
#include <torch/library.h>

#include "bind/bind.hpp"
#include "fused/all_reduce.hpp"
#include "fused/fused.hpp"
#include "fused/norm.hpp"

namespace py = pybind11;

namespace symm {

void bind_fused(py::module_& module) {
  module.def(
      "_drop_workspaces", &Workspace::drop, py::arg("group_name"),
      py::call_guard<py::gil_scoped_release>(),
      "Gives up the workspaces of the fused operators of this group, and those of groups that are "
      "no more.");
}

} // namespace symm

TORCH_LIBRARY_FRAGMENT(symm, library) {
  library.def(
      "_all_gather_matmul(Tensor A_shard, Tensor[] Bs, str group_name, bool return_A) -> (Tensor, "
      "Tensor[])");
  library.def("_matmul_reduce_scatter(Tensor A, Tensor B, bool avg, str group_name) -> Tensor");
  library.def(
      "all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor",
      {at::Tag::needs_fixed_stride_order});
  const auto norm = [&](const char* name, const char* tensors, const char* scale,
                        const char* results) {
    const std::string head = std::string("all_reduce_add_rms_norm") + name + "(" + tensors;
    const std::string schema =
        head + ", Tensor weight, float eps, " + scale + "str group_name) -> " + results;
    library.def(schema.c_str(), {at::Tag::needs_fixed_stride_order});
  };
  norm("", "Tensor input, Tensor residual", "", "(Tensor normed, Tensor residual_out)");
  norm("_", "Tensor(a!) input, Tensor(b!) residual", "", "()");
  norm(
      "_fp8", "Tensor input, Tensor residual", "Tensor scale, ",
      "(Tensor normed, Tensor residual_out)");
  norm(
      "_dynamic_fp8", "Tensor input, Tensor residual", "",
      "(Tensor normed, Tensor residual_out, Tensor scales)");
}

namespace {

void add_norms(torch::Library& library) {
  library.impl("all_reduce_add_rms_norm", &symm::all_reduce_add_rms_norm);
  library.impl("all_reduce_add_rms_norm_", &symm::all_reduce_add_rms_norm_);
  library.impl("all_reduce_add_rms_norm_fp8", &symm::all_reduce_add_rms_norm_fp8);
  library.impl("all_reduce_add_rms_norm_dynamic_fp8", &symm::all_reduce_add_rms_norm_dynamic_fp8);
}

} // namespace

TORCH_LIBRARY_IMPL(symm, Meta, library) {
  symm::add_norm_shapes(library);
  library.impl("all_reduce", &symm::all_reduce_shape);
  library.impl("_all_gather_matmul", &symm::all_gather_matmul_shapes);
  library.impl("_matmul_reduce_scatter", &symm::matmul_reduce_scatter_shape);
}

TORCH_LIBRARY_IMPL(symm, Autograd, library) {
  for (const auto* form : {"", "_", "_fp8", "_dynamic_fp8"}) {
    const auto name = std::string("all_reduce_add_rms_norm") + form;
    library.impl(
        name.c_str(), torch::CppFunction::makeFromBoxedFunction<&symm::refuse_gradients>());
  }
  library.impl("all_reduce", torch::CppFunction::makeFromBoxedFunction<&symm::refuse_gradients>());
}

TORCH_LIBRARY_IMPL(symm, CPU, library) {
  add_norms(library);
  library.impl("all_reduce", &symm::all_reduce);
  library.impl("_all_gather_matmul", &symm::all_gather_matmul);
  library.impl("_matmul_reduce_scatter", &symm::matmul_reduce_scatter);
}

TORCH_LIBRARY_IMPL(symm, CUDA, library) {
  add_norms(library);
  library.impl("all_reduce", &symm::all_reduce);
  library.impl("_all_gather_matmul", &symm::all_gather_matmul);
  library.impl("_matmul_reduce_scatter", &symm::matmul_reduce_scatter);
}
