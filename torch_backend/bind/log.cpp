// The core's log in Python.
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bind/bind.hpp"
#include "symm/src/bridge.rs.h"

namespace py = pybind11;

namespace symm {

void bind_log(py::module_& module) {
  module.def("_inform", [](const std::string& text) { inform(rust::Str(text)); }, py::arg("text"));

  module.def("_log_to_queue", [](const std::string& filter) { log_to_queue(rust::Str(filter)); }, py::arg("filter"));

  module.def("_log_to_standard_error", [] { log_to_standard_error(); });

  // The core never waits for Python: it leaves its lines here, and a thread of Python's fetches them.
  module.def(
      "_log_lines",
      [](uint64_t limit_ms) {
        std::vector<std::tuple<std::string, std::string, std::string, double>> lines;
        for (const auto& line : log_lines(limit_ms)) {
          lines.emplace_back(std::string(line.level), std::string(line.target), std::string(line.text), line.seconds);
        }
        return lines;
      },
      py::arg("limit_ms"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace symm
