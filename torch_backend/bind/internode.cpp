// Backends between nodes, which Python makes.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "bind/bind.hpp"
#include "errors.hpp"
#include "internode/backend_factory.hpp"
#include "symm/src/bridge.rs.h"

namespace py = pybind11;

namespace symm {

namespace {

// Returns the result of `ask`, called with the GIL. A Python exception becomes a C++ exception with
// its message.
template <typename Ask>
auto asked(Ask&& ask) {
  const py::gil_scoped_acquire gil;
  try {
    return ask();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(py::str(error.value()));
  }
}

// Returns the backend `made`. If its class is a Python class, this also keeps the Python object
// alive, because the object has the methods.
BackendPtr kept(py::object made) {
  auto backend = made.cast<Holder<::c10d::Backend>>();
  auto* const pointer = backend.get();
  if (!py::hasattr(made, "__dict__")) {
    return {pointer, [backend = std::move(backend)](auto*) mutable { backend.reset(); }};
  }
  return {pointer, [backend = std::move(backend), object = made.release()](auto*) mutable {
            {
              const py::gil_scoped_acquire gil;
              object.dec_ref();
            }
            // This may wait for the backend's transfers.
            backend.reset();
          }};
}

} // namespace

void bind_internode(py::module_& module) {
  module.def(
      "_set_backend_factory",
      [](py::function make, py::function find) {
        // Never released, because groups may be made until the process ends.
        BackendFactories factories;
        factories.make = [make = make.release()](const auto&... arguments) {
          return asked([&] { return kept(make(arguments...)); });
        };
        factories.find = [find = find.release()](const auto& choice) {
          return asked(
              [&] { return find(choice).template cast<std::pair<std::string, std::string>>(); });
        };
        set_backend_factories(std::move(factories));
      },
      py::arg("make"),
      py::arg("find"));
  module.def("_node_id", [] { return std::string(node_id()); });
  module.def(
      "_set_trial_thresholds",
      [](size_t multi_rail_bytes, size_t chunk_bytes, size_t gather_bytes) {
        check(set_trial_thresholds(multi_rail_bytes, chunk_bytes, gather_bytes));
      },
      py::arg("multi_rail_bytes"),
      py::arg("chunk_bytes"),
      py::arg("gather_bytes"));
}

} // namespace symm
