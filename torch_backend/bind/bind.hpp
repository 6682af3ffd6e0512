// The parts of the Python module torch_symm._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace symm {

template <typename T>
using Holder = c10::intrusive_ptr<T>;

void bind_cost(pybind11::module_& module);
void bind_gloo_substitute(pybind11::module_& module);
void bind_fused(pybind11::module_& module);
void bind_internode(pybind11::module_& module);
void bind_log(pybind11::module_& module);
void bind_stores(pybind11::module_& module);
void bind_topology(pybind11::module_& module);
void bind_symmetric_memory(pybind11::module_& module);
void bind_trace(pybind11::module_& module);

} // namespace symm
