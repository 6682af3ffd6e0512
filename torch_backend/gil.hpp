// Waiting for other ranks without keeping this process's other Python threads from running.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <utility>

namespace symm {

// Returns, or throws, what `call` does; the GIL is free meanwhile if this thread had it. c10d's bindings of symmetric memory keep it.
template <typename Call>
auto without_gil(Call&& call) -> decltype(call()) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    const pybind11::gil_scoped_release release;
    return std::forward<Call>(call)();
  }
  return std::forward<Call>(call)();
}

} // namespace symm
