// Python bindings of the stores.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <sstream>

#include "bind/bind.hpp"
#include "errors.hpp"
#include "store/native_store.hpp"
#include "store/store.hpp"

namespace py = pybind11;

namespace symm {

namespace {

using Milliseconds = SymmStore::Milliseconds;

Holder<TcpStore> open_tcp(
    const std::string& host,
    int64_t port,
    std::optional<int64_t> world_size,
    bool is_master,
    Milliseconds timeout,
    bool wait_for_workers,
    bool multi_tenant,
    std::optional<int32_t> listen_fd,
    const std::optional<std::string>& secret,
    bool require_same_user) {
  TORCH_CHECK_VALUE(
      port >= 0 && port <= UINT16_MAX, "port must have value from 0 to 65535 but was ", port, ".");
  TORCH_CHECK_VALUE(world_size != 0, "TCPStore world size cannot be 0");
  TORCH_CHECK_VALUE(
      world_size.value_or(0) <= UINT32_MAX, "TCPStore world size ", *world_size, " is too large");
  TORCH_CHECK_VALUE(!secret || !secret->empty(), "the secret of a TCPStore cannot be empty");
  TcpSpec spec;
  spec.host = host;
  spec.port = static_cast<uint16_t>(port);
  spec.world_size = world_size.value_or(-1);
  spec.is_master = is_master;
  spec.timeout_ms = timeout.count();
  spec.wait_for_workers = wait_for_workers;
  spec.multi_tenant = multi_tenant;
  spec.listen_fd = listen_fd.value_or(-1);
  for (const char byte : secret.value_or("")) {
    spec.secret.push_back(static_cast<uint8_t>(byte));
  }
  spec.require_same_user = require_same_user;
  // This is not a call guard, because pybind11 would then register the new object without the GIL.
  const py::gil_scoped_release released;
  return c10::make_intrusive<TcpStore>(spec);
}

std::optional<int64_t> known(int64_t world_size) {
  return world_size < 0 ? std::nullopt : std::optional(world_size);
}

py::str path_of(const FileStore& self) {
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeFSDefaultAndSize(
      self.path.data(), static_cast<Py_ssize_t>(self.path.size())));
}

py::str repr_tcp(const TcpStore& self) {
  return py::str("TCPStore({!r}, {}, world_size={}, is_master={}, timeout={!r}, secret={})")
      .format(
          self.host, self.port, known(self.world_size), self.is_master, self.getTimeout(),
          self.has_secret ? "..." : "None");
}

// Returns (class, arguments) with which another process opens the store as a client.
py::tuple reduce_tcp(const py::object& self) {
  const auto& store = self.cast<const TcpStore&>();
  TORCH_CHECK_TYPE(
      !store.has_secret,
      "a TCPStore with a secret cannot be pickled: the secret would stand in the pickle; open one "
      "in the other process");
  return py::make_tuple(
      py::type::of(self),
      py::make_tuple(
          store.host, store.port, known(store.world_size), false, store.getTimeout(), false));
}

} // namespace

void bind_stores(py::module_& module) {
  watch_interrupts(python_signals());
  const py::call_guard<py::gil_scoped_release> released;
  py::class_<SymmStore, Holder<SymmStore>, ::c10d::Store>(module, "NativeStore")
      .def(
          "rank_barrier", &SymmStore::rankBarrier, py::arg("key"), py::arg("rank"),
          py::arg("world_size"), py::arg("timeout") = py::none(), released)
      .def(
          "_assemble", &SymmStore::assemble, py::arg("prefix"), py::arg("rank"),
          py::arg("world_size"), py::arg("timeout"), released)
      .def(
          "_gather", &SymmStore::gather, py::arg("prefix"), py::arg("what"), py::arg("word"),
          py::arg("rank"), py::arg("world_size"), py::arg("timeout"), released)
      .def("__copy__", &SymmStore::clone, released)
      .def(
          "__deepcopy__", [](SymmStore& self, const py::dict&) { return self.clone(); },
          py::arg("memo"))
      .def("__reduce__", [](const SymmStore&) -> py::tuple {
        TORCH_CHECK_TYPE(
            false,
            "this store lives in its process and cannot be pickled; use a TCPStore or a FileStore");
      });

  py::class_<MemoryStore, Holder<MemoryStore>, SymmStore>(module, "MemoryStore")
      .def(py::init<>())
      .def("__repr__", [](const MemoryStore& self) {
        return py::str("MemoryStore(timeout={!r})").format(self.getTimeout());
      });

  py::class_<FileStore, Holder<FileStore>, SymmStore>(module, "FileStore")
      .def(
          py::init([](const std::filesystem::path& path, int64_t world_size,
                      std::chrono::milliseconds timeout) {
            const py::gil_scoped_release open;
            return c10::make_intrusive<FileStore>(path.native(), world_size, timeout);
          }),
          py::arg("path"), py::arg("world_size"),
          py::arg("timeout") = ::c10d::Store::kDefaultTimeout)
      .def_property_readonly("path", &path_of)
      .def_readonly("world_size", &FileStore::world_size)
      .def(
          "__reduce__",
          [](const py::object& self) {
            const auto& store = self.cast<const FileStore&>();
            return py::make_tuple(
                py::type::of(self),
                py::make_tuple(path_of(store), store.world_size, store.getTimeout()));
          })
      .def("__repr__", [](const FileStore& self) {
        return py::str("FileStore({!r}, {}, timeout={!r})")
            .format(path_of(self), self.world_size, self.getTimeout());
      });

  py::class_<TcpStore, Holder<TcpStore>, SymmStore>(module, "TCPStore")
      .def(
          py::init(&open_tcp), py::arg("host_name"), py::arg("port"),
          py::arg("world_size") = py::none(), py::arg("is_master") = false,
          py::arg("timeout") = ::c10d::Store::kDefaultTimeout, py::arg("wait_for_workers") = true,
          py::arg("multi_tenant") = false, py::arg("master_listen_fd") = py::none(),
          py::arg("secret") = py::none(), py::arg("require_same_user") = false)
      .def_readonly("host", &TcpStore::host)
      .def_readonly("port", &TcpStore::port)
      .def_readonly("is_master", &TcpStore::is_master)
      .def_property_readonly(
          "world_size", [](const TcpStore& self) { return known(self.world_size); })
      .def("__reduce__", &reduce_tcp)
      .def("__repr__", &repr_tcp);

  // For benchmarks: returns the total seconds, and the nanoseconds of each call, of clients that
  // call concurrently.
  module.def(
      "_run_load",
      [](const std::vector<Holder<::c10d::Store>>& clients, const std::string& work,
         uint32_t calls) {
        auto all = load_generator();
        for (const auto& client : clients) {
          all->add_client(std::make_unique<TorchStore>(client));
        }
        const auto answer = all->run_load(work, calls);
        check(answer.status);
        return std::make_pair(
            answer.seconds,
            std::vector<uint64_t>(answer.nanoseconds.begin(), answer.nanoseconds.end()));
      },
      py::arg("clients"), py::arg("work"), py::arg("calls"), released);

  // torch's store as the core sees it, for tests of both directions of the bridge.
  module.def(
      "_wrap_store",
      [](const Holder<::c10d::Store>& store) {
        const auto timeout = store->getTimeout();
        return c10::make_intrusive<SymmStore>(
            wrap_store(std::make_unique<TorchStore>(store)), timeout);
      },
      py::arg("store"),
      released);
}

} // namespace symm
