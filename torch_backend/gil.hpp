// Waits for other ranks without blocking this process's other Python threads.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <utility>

namespace symm {

// Returns or throws the outcome of `call`, and releases the GIL meanwhile if this thread holds it.
// c10d's bindings of symmetric memory do not release it.
template <typename Call>
auto without_gil(Call&& call) -> decltype(call()) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    const pybind11::gil_scoped_release release;
    return std::forward<Call>(call)();
  }
  return std::forward<Call>(call)();
}

} // namespace symm
