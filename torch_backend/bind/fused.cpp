// The operators' schemas: Python reaches them by torch.ops.symm, and has the implementations for tensors without memory. They stand here
// since the linker takes only files of which a name is used.
#include <torch/library.h>

#include "bind/bind.hpp"
#include "fused/fused.hpp"

namespace py = pybind11;

namespace symm {

void bind_fused(py::module_& module) {
  module.def(
      "_drop_workspaces", &Workspace::drop, py::arg("group_name"), py::call_guard<py::gil_scoped_release>(),
      "Gives up the workspaces of the fused operators of this group, and those of groups that are no more.");
}

} // namespace symm

TORCH_LIBRARY_FRAGMENT(symm, library) {
  library.def("_all_gather_matmul(Tensor A_shard, Tensor[] Bs, str group_name, bool return_A) -> (Tensor, Tensor[])");
  library.def("_matmul_reduce_scatter(Tensor A, Tensor B, bool avg, str group_name) -> Tensor");
}

TORCH_LIBRARY_IMPL(symm, CPU, library) {
  library.impl("_all_gather_matmul", &symm::all_gather_matmul);
  library.impl("_matmul_reduce_scatter", &symm::matmul_reduce_scatter);
}

TORCH_LIBRARY_IMPL(symm, CUDA, library) {
  library.impl("_all_gather_matmul", &symm::all_gather_matmul);
  library.impl("_matmul_reduce_scatter", &symm::matmul_reduce_scatter);
}
