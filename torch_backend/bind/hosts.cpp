// Backends between nodes, which Python makes.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "bind/bind.hpp"
#include "errors.hpp"
#include "hosts/engines.hpp"
#include "symm/src/bridge.rs.h"

namespace py = pybind11;

namespace symm {

namespace {

// Returns the result of `ask`, called with the GIL. A Python exception becomes a C++ exception with its message.
template <typename Ask>
auto asked(Ask&& ask) {
  const py::gil_scoped_acquire gil;
  try {
    return ask();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(py::str(error.value()));
  }
}

// Keeps the Python object of `made` alive if its class is a Python class, because its methods live there.
Engine kept(py::object made) {
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
            // May wait for its transfers.
            backend.reset();
          }};
}

} // namespace

void bind_hosts(py::module_& module) {
  module.def(
      "_make_backends_with",
      [](py::function make, py::function find) {
        // Never released, because groups may be made until the process ends.
        Engines engines;
        engines.make = [make = make.release()](const auto&... arguments) {
          return asked([&] { return kept(make(arguments...)); });
        };
        engines.find = [find = find.release()](const auto& choice) {
          return asked([&] { return find(choice).template cast<std::pair<std::string, std::string>>(); });
        };
        make_engines_with(std::move(engines));
      },
      py::arg("make"),
      py::arg("find"));
  module.def("_host", [] { return std::string(host_identity()); });
  module.def(
      "_try_thresholds",
      [](size_t one_rail, size_t piece, size_t gathered) { check(try_thresholds(one_rail, piece, gathered)); },
      py::arg("one_rail"),
      py::arg("piece"),
      py::arg("gathered"));
}

} // namespace symm
