// Python bindings of symm groups that replace Gloo groups.
#include "process_group/gloo_substitute.hpp"

#include "bind/bind.hpp"
#include "errors.hpp"

namespace py = pybind11;

namespace symm {

namespace {

// torch's ProcessGroupGloo; null if this torch has no such class. Lives as long as the process.
PyObject* class_of_gloo = nullptr;

// `self.__class__`. Code that checks isinstance(backend, ProcessGroupGloo) asks whether Gloo's
// rules apply; C++ checks the real type.
PyObject* apparent_class(PyObject* self, void*) {
  PyObject* const seen =
      class_of_gloo != nullptr ? class_of_gloo : reinterpret_cast<PyObject*>(Py_TYPE(self));
  Py_INCREF(seen);
  return seen;
}

// Makes an exception class that derives from `ours` and from RuntimeError, which Gloo raises for a
// bad argument.
void bind_refusal(py::module_& module, ErrorKind kind, const char* name, PyObject* ours) {
  const auto bases = py::make_tuple(py::handle(ours), py::handle(PyExc_RuntimeError));
  const std::string full = std::string("torch_symm._C.") + name;
  // Lives as long as the process, like the other exception types.
  PyObject* type = PyErr_NewExceptionWithDoc(
      full.c_str(), "An argument is wrong, in a group in the place of Gloo's.", bases.ptr(),
      nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  set_python_type(kind, type);
  module.attr(name) = py::reinterpret_borrow<py::object>(type);
}

PyGetSetDef properties[] = {
    {"__class__", apparent_class, nullptr, "ProcessGroupGloo, for isinstance.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

} // namespace

void bind_gloo_substitute(py::module_& module) {
  const auto c10d = py::module_::import("torch._C._distributed_c10d");
  if (py::hasattr(c10d, "ProcessGroupGloo")) {
    class_of_gloo = c10d.attr("ProcessGroupGloo").cast<py::object>().release().ptr();
  }
  // If pybind11 defined `__class__`, it would become the class of the type itself.
  const auto with_class =
      py::custom_type_setup([](PyHeapTypeObject* type) { type->ht_type.tp_getset = properties; });
  bind_refusal(module, ErrorKind::Value, "_GlooValueError", PyExc_ValueError);
  bind_refusal(module, ErrorKind::Type, "_GlooTypeError", PyExc_TypeError);
  py::class_<GlooSubstitute, Holder<GlooSubstitute>, ProcessGroupSymm> replacing(
      module, "_GlooSubstitute", with_class);
  // Members of Gloo's class that clients also access through the backend.
  for (const auto* name : {"Device", "_Options", "create_default_device", "create_device"}) {
    if (class_of_gloo != nullptr && py::hasattr(class_of_gloo, name)) {
      replacing.attr(name) = py::handle(class_of_gloo).attr(name);
    }
  }
  replacing.def(
      py::init<
          const Holder<::c10d::Store>&, const Holder<::c10d::Store>&, int, int,
          Holder<ProcessGroupSymm::Options>, bool>(),
      py::arg("store"),
      py::arg("gloo_store"),
      py::arg("rank"),
      py::arg("size"),
      py::arg("options"),
      py::arg("cuda"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace symm
