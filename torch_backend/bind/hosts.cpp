// Backends between hosts, which Python makes.
#include <pybind11/chrono.h>

#include <utility>

#include "bind/bind.hpp"
#include "errors.hpp"
#include "hosts/backend_rail.hpp"
#include "symm/src/bridge.rs.h"

namespace py = pybind11;

namespace symm {

void bind_hosts(py::module_& module) {
  module.def(
      "_make_backends_with",
      [](const py::function& function) {
        // Never released: groups may be made until the process ends.
        const auto make = py::reinterpret_borrow<py::function>(py::function(function).release());
        make_backends_with([make = make.ptr()](const auto& engine, const auto& name, const auto& store, int rank, int size, auto timeout) {
          const py::gil_scoped_acquire gil;
          const auto call = py::reinterpret_borrow<py::function>(make);
          return call(engine, name, store, rank, size, timeout).template cast<Holder<::c10d::Backend>>();
        });
      },
      py::arg("function"));
  module.def("_host", [] { return std::string(host_identity()); });
  module.def(
      "_try_thresholds",
      [](size_t one_rail, size_t piece, size_t gathered) { check(try_thresholds(one_rail, piece, gathered)); },
      py::arg("one_rail"),
      py::arg("piece"),
      py::arg("gathered"));
}

} // namespace symm
