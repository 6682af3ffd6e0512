// The Python module torch_symm._C.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <chrono>
#include <cmath>
#include <variant>

#include "bind/bind.hpp"
#include "errors.hpp"
#include "process_group/process_group.hpp"

namespace py = pybind11;

namespace symm {

namespace {

// Makes a subclass of torch.distributed.DistBackendError for failures of this kind.
void bind_error(py::module_& module, ErrorKind kind, const char* name, const char* doc) {
  const py::object base = py::module_::import("torch._C").attr("_DistBackendError");
  const std::string full = std::string("torch_symm.") + name;
  // Lives as long as the process, because any thread may throw exceptions until the end.
  PyObject* type = PyErr_NewExceptionWithDoc(full.c_str(), doc, base.ptr(), nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  set_python_type(kind, type);
  module.attr(name) = py::reinterpret_borrow<py::object>(type);
}

using Options = ProcessGroupSymm::Options;

// A number of seconds or a timedelta. `double` comes first, because pybind11 would convert a float
// to milliseconds without a check.
using Timeout = std::variant<double, std::chrono::milliseconds>;

std::chrono::milliseconds milliseconds_of(const Timeout& timeout) {
  if (const auto* given = std::get_if<std::chrono::milliseconds>(&timeout)) {
    TORCH_CHECK_VALUE(
        given->count() > 0, "timeout must be more than 0 seconds, not ", given->count() * 1e-3);
    return *given;
  }
  const double seconds = std::get<double>(timeout);
  // A year, because a longer deadline overflows some clocks. NaN fails both comparisons.
  constexpr double kLongest = 365.0 * 24 * 3600;
  TORCH_CHECK_VALUE(
      seconds > 0 && seconds <= kLongest, "timeout must be more than 0 and at most ", kLongest,
      " seconds, not ", seconds);
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

// Sets a choice of the options; throws, and changes nothing, if it is not valid.
template <auto field, typename Value>
void choose(Options& self, const Value& value) {
  const auto before = std::exchange(self.*field, value);
  try {
    check_choices(self);
  } catch (...) {
    self.*field = before;
    throw;
  }
}

// The options' fields as a tuple, for pickle.
py::tuple state_of(const Options& self) {
  return py::make_tuple(
      self.timeout, self.group_name, self.group_desc, self.global_ranks_in_group,
      reconfigurable(self), self.inter_node_backend, self.reduce_dtype, self.order,
      self.cta_policy, self.max_ctas);
}

Holder<Options> options_of(const py::tuple& state) {
  auto options = c10::make_intrusive<Options>(state[0].cast<std::chrono::milliseconds>());
  options->group_name = state[1].cast<std::string>();
  options->group_desc = state[2].cast<std::string>();
  options->global_ranks_in_group = state[3].cast<std::vector<uint64_t>>();
  set_reconfigurable(*options, state[4].cast<bool>(), 0);
  options->inter_node_backend = state[5].cast<std::string>();
  options->reduce_dtype = state[6].cast<std::string>();
  options->order = state[7].cast<std::string>();
  options->cta_policy = state[8].cast<std::string>();
  options->max_ctas = state[9].cast<int>();
  check_choices(*options);
  return options;
}

void bind(py::module_ module) {
  module.doc() = "The native part of torch_symm.";
  module.attr("__version__") = std::string(version());
  bind_error(
      module, ErrorKind::Peer, "SymmPeerError",
      "A rank died, left or aborted while others needed it.");
  bind_error(
      module, ErrorKind::Timeout, "SymmTimeoutError",
      "A deadline passed; the message names the ranks that are missing.");
  bind_error(
      module, ErrorKind::Mismatch, "SymmMismatchError",
      "Ranks were asked for different collectives; the message shows each.");
  bind_error(
      module, ErrorKind::Config, "SymmConfigError",
      "A group cannot be formed or used here; the message says why.");
  bind_error(
      module, ErrorKind::Aborted, "SymmAbortedError",
      "This process aborted or destroyed the group.");

  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (CoreError& failure) {
      PyErr_SetString(failure.python_type(), failure.what());
    }
  });

  // Called before the interpreter ends, because afterwards a thread that drops a tensor with a
  // Python object would end the process.
  module.def(
      "_destroy_all",
      [](const std::string& farewell) { leave_all(std::chrono::seconds(5), farewell); },
      py::arg("farewell") = "",
      py::call_guard<py::gil_scoped_release>());

  py::class_<Options, Holder<Options>, ::c10d::Backend::Options>(module, "Options")
      .def(
          py::init([](const Timeout& timeout,
                      const std::string& group,
                      const std::vector<uint64_t>& ranks,
                      const std::string& inter_node_backend,
                      const std::string& reduce_dtype,
                      const std::string& order,
                      const std::string& cta_policy,
                      int max_ctas) {
            auto options = c10::make_intrusive<Options>(milliseconds_of(timeout));
            options->group_name = group;
            options->global_ranks_in_group = ranks;
            options->inter_node_backend = inter_node_backend;
            options->reduce_dtype = reduce_dtype;
            options->order = order;
            options->cta_policy = cta_policy;
            options->max_ctas = max_ctas;
            check_choices(*options);
            return options;
          }),
          py::arg("timeout") = Timeout(kBackendDefaultTimeout),
          py::arg("group_name") = "",
          py::arg("global_ranks_in_group") = std::vector<uint64_t>(),
          py::arg("inter_node_backend") = "",
          py::arg("reduce_dtype") = "",
          py::arg("order") = "",
          py::arg("cta_policy") = "",
          py::arg("max_ctas") = 0)
      .def_readwrite("inter_node_backend", &Options::inter_node_backend)
      .def_property(
          "reduce_dtype", [](const Options& self) { return self.reduce_dtype; },
          &choose<&Options::reduce_dtype, std::string>)
      .def_property(
          "order", [](const Options& self) { return self.order; },
          &choose<&Options::order, std::string>)
      .def_property(
          "cta_policy", [](const Options& self) { return self.cta_policy; },
          &choose<&Options::cta_policy, std::string>)
      .def_property(
          "max_ctas", [](const Options& self) { return self.max_ctas; },
          &choose<&Options::max_ctas, int>)
      .def(py::pickle(&state_of, &options_of))
      .def_property(
          "timeout",
          [](const Options& self) { return self.timeout; },
          [](Options& self, const Timeout& timeout) { self.timeout = milliseconds_of(timeout); })
      .def("__copy__", [](const Options& self) { return c10::make_intrusive<Options>(self); })
      .def(
          "__deepcopy__",
          [](const Options& self, const py::dict&) { return c10::make_intrusive<Options>(self); },
          py::arg("memo"));

  py::class_<ProcessGroupSymm, Holder<ProcessGroupSymm>, ::c10d::Backend>(
      module, "ProcessGroupSymm")
      .def(
          py::init<const Holder<::c10d::Store>&, int, int, Holder<Options>>(), py::arg("store"),
          py::arg("rank"), py::arg("size"), py::arg("options"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          py::init([](const Holder<::c10d::Store>& store, int rank, int size,
                      const Timeout& timeout, const std::string& group) {
            auto options = c10::make_intrusive<Options>(milliseconds_of(timeout));
            options->group_name = group;
            // Joining waits for peers. The result needs the GIL again, for pybind11.
            const py::gil_scoped_release release;
            return c10::make_intrusive<ProcessGroupSymm>(store, rank, size, std::move(options));
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"),
          py::arg("timeout") = Timeout(kBackendDefaultTimeout), py::arg("group_name") = "")
      .def_property_readonly("options", &ProcessGroupSymm::options)
      .def(
          "_set_default_timeout",
          [](ProcessGroupSymm& self, const Timeout& timeout) {
            self.setTimeout(milliseconds_of(timeout));
          },
          py::arg("timeout"))
      // Does nothing: torch calls it on ranks outside a new group, because NCCL's split is
      // collective; ours involves only the new members.
      .def(
          "perform_nocolor_split", [](ProcessGroupSymm&, const at::Device&) {}, py::arg("device"))
      // torch's shrink_group queries this, and then raises a TypeError that does not name an
      // alternative; the warning does.
      .def_property_readonly(
          "supports_shrinking",
          [](const ProcessGroupSymm&) {
            const py::object category =
                py::module_::import("torch_symm._warnings").attr("SymmWarning");
            constexpr auto text =
                "symm does not serve shrink_group. While all ranks live, dist.new_group(ranks) "
                "makes the smaller group. After a rank has "
                "ended, the others call destroy_process_group() and init_process_group() with "
                "their new ranks and world size.";
            if (PyErr_WarnEx(category.ptr(), text, 2) < 0) {
              throw py::error_already_set();
            }
            return false;
          })
      // c10d's own binding passes only the device's index, without its type.
      .def(
          "supports_tensor_alloc",
          [](ProcessGroupSymm&, const at::Device& device) {
            return sharing_device(device).has_value();
          },
          py::arg("device"))
      .def(
          "_device",
          [](const ProcessGroupSymm& self) -> std::optional<int> {
            const int device = (*self.core())->device();
            return device < 0 ? std::nullopt : std::make_optional(device);
          })
      .def(
          "_drop_coalesced", &ProcessGroupSymm::drop_coalesced,
          py::call_guard<py::gil_scoped_release>())
      .def("get_error", &ProcessGroupSymm::getError)
      .def("get_sequence_number", &ProcessGroupSymm::getSequenceNumberForGroup)
      .def("abort", &ProcessGroupSymm::abort, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &ProcessGroupSymm::shutdown, py::call_guard<py::gil_scoped_release>());

  bind_gloo_substitute(module);
  module.def("_stats", [] { return std::string(stats()); });
  module.def("_stats_seconds", [] { return stats_seconds(); });
  module.def("_supports_symm_mem", &supports_symm_mem, py::arg("device"));

  bind_symmetric_memory(module);
  bind_cost(module);
  bind_fused(module);
  bind_internode(module);
  bind_log(module);
  bind_stores(module);
  bind_topology(module);
  bind_trace(module);
  module.def("_cuda_libraries", &cuda_libraries, py::arg("folders"));
}

} // namespace

} // namespace symm

PYBIND11_MODULE(_C, module) {
  symm::bind(module);
}
