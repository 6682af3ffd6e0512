// Python bindings of the prices of collectives.
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "bind/bind.hpp"
#include "errors.hpp"
#include "symm/src/bridge/cost.rs.h"

namespace py = pybind11;

namespace symm {

namespace {

rust::Slice<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Prices on one mesh. Immutable, so any thread may use it.
struct Prices {
  rust::Box<CostModel> model;
};

// Returns null if no profile matches this hardware.
std::unique_ptr<Prices> open_prices(
    const std::string& device,
    const std::vector<size_t>& ranks,
    size_t job,
    size_t per_node,
    const std::string& source,
    const std::vector<double>& gb_per_s,
    const std::vector<double>& us,
    const std::string& profile) {
  CostMesh mesh;
  mesh.device = rust::String::lossy(device);
  for (const size_t size : ranks) {
    mesh.ranks.push_back(size);
  }
  mesh.job = job;
  mesh.per_node = per_node;
  auto opened = cost_model(
      mesh, rust::String::lossy(source), {gb_per_s.data(), gb_per_s.size()}, {us.data(), us.size()},
      bytes_of(profile));
  check(opened.status);
  return opened.found ? std::make_unique<Prices>(Prices{std::move(opened.model)}) : nullptr;
}

std::vector<double> listed(const rust::Vec<double>& values) {
  return {values.begin(), values.end()};
}

} // namespace

void bind_cost(py::module_& module) {
  py::class_<Prices>(module, "_CostModel")
      .def(
          "price",
          [](const Prices& self, const std::string& op, double bytes, size_t dim) {
            const auto price = self.model->price(rust::String::lossy(op), bytes, dim);
            check(price.status);
            return std::make_tuple(
                price.us, std::string(price.algorithm), std::string(price.basis));
          },
          py::arg("op"), py::arg("bytes"), py::arg("dim"))
      .def_property_readonly(
          "local",
          [](const Prices& self) -> std::optional<std::tuple<double, double, double>> {
            const auto local = self.model->local();
            if (!local.known) {
              return std::nullopt;
            }
            return std::make_tuple(local.step_us, local.slice_us, local.copy_gb_per_s);
          })
      .def_property_readonly(
          "gb_per_s", [](const Prices& self) { return listed(self.model->gb_per_s()); })
      .def_property_readonly("us", [](const Prices& self) { return listed(self.model->trip_us()); })
      .def_property_readonly(
          "reference_us", [](const Prices& self) { return self.model->reference_us(); })
      .def_property_readonly(
          "origin", [](const Prices& self) { return std::string(self.model->origin()); });

  module.def(
      "_open_cost_model",
      &open_prices,
      py::arg("device"),
      py::arg("ranks"),
      py::arg("job"),
      py::arg("per_node"),
      py::arg("source"),
      py::arg("gb_per_s") = std::vector<double>(),
      py::arg("us") = std::vector<double>(),
      py::arg("profile") = std::string());

  module.def(
      "_profile_key",
      [](const std::string& device, size_t ranks) {
        const auto key = profile_key(rust::String::lossy(device), ranks);
        check(key.status);
        return std::string(key.text);
      },
      py::arg("device"),
      py::arg("ranks"));

  module.def(
      "_set_bundled_profile_dir",
      [](const std::string& folder) { set_bundled_profile_dir(bytes_of(folder)); },
      py::arg("folder"));

  module.def("_user_profile_dir", [] {
    const auto folder = user_profile_dir();
    return py::bytes(reinterpret_cast<const char*>(folder.data()), folder.size());
  });
}

} // namespace symm
