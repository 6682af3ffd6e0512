// Python binding of the handles of symmetric memory.
#include <pybind11/stl.h>

#include "bind/bind.hpp"
#include "symm_mem/operators.hpp"
#include "symm_mem/symmetric_memory.hpp"

namespace py = pybind11;

namespace symm {

void bind_symmetric_memory(py::module_& module) {
  namespace torch_memory = ::c10d::symmetric_memory;
  // torch's rendezvous() returns objects of this class, too, because pybind11 uses an object's
  // dynamic type. Its methods hide torch's, which return tensors that do not keep the window alive.
  py::class_<SymmetricWindow, torch_memory::SymmetricMemory, Holder<SymmetricWindow>>(
      module, "SymmetricWindow")
      .def(
          "get_buffer", &SymmetricWindow::get_buffer, py::arg("rank"), py::arg("sizes"),
          py::arg("dtype"), py::arg("storage_offset") = 0)
      .def(
          "get_signal_pad", &SymmetricWindow::get_signal_pad, py::arg("rank"),
          py::arg("sizes") = std::vector<int64_t>(), py::arg("dtype") = std::nullopt,
          py::arg("storage_offset") = 0)
      .def(
          "get_remote_tensor", &SymmetricWindow::get_remote_tensor, py::arg("peer"),
          py::arg("sizes"), py::arg("dtype"));
  module.def(
      "_compare_operators", &compare_operators, py::arg("group_name"), py::arg("call"),
      "Returns once all ranks have called it; raises on all ranks if their calls differ.");
  module.def(
      "_reject_operator", &reject_operator, py::arg("group_name"), py::arg("reason"),
      "Notifies ranks that wait for this one that it has rejected an operator on CPU tensors.");
  register_symmetric_memory();
}

} // namespace symm
