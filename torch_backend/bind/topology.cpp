// Python bindings of the GPU topology.
#include <pybind11/stl.h>

#include "bind/bind.hpp"
#include "errors.hpp"

namespace py = pybind11;

namespace symm {

void bind_topology(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> released;
  module.def(
      "_nvlink_matrix",
      [](const std::vector<std::string>& uuids) {
        const std::vector<rust::String> names(uuids.begin(), uuids.end());
        const auto matrix = nvlink_matrix({names.data(), names.size()});
        check(matrix.status);
        std::vector<std::vector<uint32_t>> rows;
        for (auto row = matrix.links.begin(); row != matrix.links.end();
             row += static_cast<std::ptrdiff_t>(uuids.size())) {
          rows.emplace_back(row, row + static_cast<std::ptrdiff_t>(uuids.size()));
        }
        return rows;
      },
      py::arg("uuids"),
      released);

  module.def(
      "_topology_report",
      [] {
        const auto report = topology_report();
        check(report.status);
        return std::string(report.text);
      },
      released);
}

} // namespace symm
