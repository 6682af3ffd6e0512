#include "process_group/call_site.hpp"

#include <Python.h>
#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

namespace py = pybind11;

namespace symm {

namespace {

// The call site of calls without a Python frame, such as the calls of autograd's threads. It is the
// same on all ranks, because these threads make the same calls on all ranks.
constexpr auto kNowhere = "no Python frame";

// Returns true for a module whose frames lie between the user's line and the call: the wrappers of
// torch and of this package, and contextlib, which runs their `with` statements.
bool is_between(std::string_view module) {
  for (const std::string_view package : {"torch", "torch_symm", "contextlib"}) {
    if (module.substr(0, package.size()) == package &&
        (module.size() == package.size() || module[package.size()] == '.')) {
      return true;
    }
  }
  return false;
}

} // namespace

uint32_t find_call_site() {
  if (!Py_IsInitialized()) {
    return call_site_number(kNowhere);
  }
  const py::gil_scoped_acquire gil;
  try {
    auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    while (frame && !frame.is_none()) {
      const std::string module = py::str(frame.attr("f_globals").attr("get")("__name__", ""));
      if (!is_between(module)) {
        const std::string file = py::str(frame.attr("f_code").attr("co_filename"));
        const std::string line = py::str(frame.attr("f_lineno"));
        return call_site_number(file + ":" + line);
      }
      frame = frame.attr("f_back");
    }
  } catch (const std::exception&) {
    // A frame that cannot be read, or a file name that cannot be decoded.
    return call_site_number(kNowhere);
  }
  return call_site_number(kNowhere);
}

} // namespace symm
