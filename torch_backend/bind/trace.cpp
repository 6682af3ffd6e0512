// Python bindings of the flight recorder.
#include "bind/bind.hpp"
#include "errors.hpp"

namespace py = pybind11;

namespace symm {

void bind_trace(py::module_& module) {
  module.def(
      "_trace",
      [] {
        const auto report = trace_text();
        check(report.status);
        return std::string(report.text);
      },
      py::call_guard<py::gil_scoped_release>());

  module.def(
      "_write_trace",
      [](const std::string& path, const std::string& name, const std::string& content) {
        const auto bytes = [](const std::string& text) {
          return rust::Slice<const uint8_t>(
              reinterpret_cast<const uint8_t*>(text.data()), text.size());
        };
        const auto report = write_trace(bytes(path), rust::Str(name), bytes(content));
        check(report.status);
        return std::string(report.text);
      },
      py::arg("path"), py::arg("name"), py::arg("content"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace symm
