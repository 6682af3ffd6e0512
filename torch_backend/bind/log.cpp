// Python bindings of the core's log.
#include <string>

#include "bind/bind.hpp"
#include "symm/src/bridge.rs.h"

namespace py = pybind11;

namespace symm {

void bind_log(py::module_& module) {
  module.def(
      "_log_info", [](const std::string& text) { inform(rust::Str(text)); }, py::arg("text"));

  module.def(
      "_log_to_queue",
      [](const std::string& filter, bool on) { log_to_queue(rust::Str(filter), on); },
      py::arg("filter"),
      py::arg("on"));

  // The core never waits for Python: it queues its lines, and a Python thread takes them.
  module.def(
      "_log_lines",
      [](uint64_t limit_ms) { return std::string(log_lines(limit_ms)); },
      py::arg("limit_ms"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace symm
