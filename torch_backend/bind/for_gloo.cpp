// Groups of symm in the place of Gloo's.
#include "process_group/for_gloo.hpp"

#include "bind/bind.hpp"

namespace py = pybind11;

namespace symm {

namespace {

// torch's ProcessGroupGloo; null: this torch has none. Lives as long as the process.
PyObject* class_of_gloo = nullptr;

// `self.__class__`. Whoever asks isinstance(backend, ProcessGroupGloo) asks whether Gloo's rules hold; C++ looks at the type instead.
PyObject* apparent_class(PyObject* self, void*) {
  PyObject* const seen = class_of_gloo != nullptr ? class_of_gloo : reinterpret_cast<PyObject*>(Py_TYPE(self));
  Py_INCREF(seen);
  return seen;
}

PyGetSetDef properties[] = {
    {"__class__", apparent_class, nullptr, "ProcessGroupGloo, for isinstance.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

} // namespace

void bind_for_gloo(py::module_& module) {
  const auto c10d = py::module_::import("torch._C._distributed_c10d");
  if (py::hasattr(c10d, "ProcessGroupGloo")) {
    class_of_gloo = c10d.attr("ProcessGroupGloo").cast<py::object>().release().ptr();
  }
  // Defined as a method of pybind11's it would be set on the type, as the type's own class.
  const auto with_class = py::custom_type_setup([](PyHeapTypeObject* type) { type->ht_type.tp_getset = properties; });
  py::class_<SymmForGloo, Holder<SymmForGloo>, ProcessGroupSymm>(module, "_SymmForGloo", with_class)
      .def(
          py::init<const Holder<::c10d::Store>&, int, int, Holder<ProcessGroupSymm::Options>, bool>(),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("options"),
          py::arg("cuda"),
          py::call_guard<py::gil_scoped_release>());
}

} // namespace symm
