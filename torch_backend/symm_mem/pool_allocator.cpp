// Uses torch's pools and pluggable allocator through Python, because their C++ headers need those
// of CUDA.
#include "symm_mem/pool_allocator.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include "symm/src/bridge.rs.h"

namespace py = pybind11;

namespace symm {

namespace {

py::object python(const char* function) {
  return py::module_::import("torch_symm._memory").attr(function);
}

} // namespace

std::shared_ptr<c10::Allocator> symmetric_allocator() {
  const py::gil_scoped_acquire gil;
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> kept;
  // Called each time, because it throws if no allocator is available.
  const py::object object = python("mem_allocator")();
  const auto& allocator =
      kept.call_once_and_store_result([&object] { return object; }).get_stored();
  // The class of the object is c10::cuda::CUDACachingAllocator::CUDAAllocator or derived from it.
  const auto type = py::module_::import("torch._C").attr("_cuda_CUDAAllocator");
  py::detail::type_caster_generic caster(
      py::detail::get_type_info(reinterpret_cast<PyTypeObject*>(type.ptr())));
  TORCH_CHECK_TYPE(caster.load(allocator, false), "torch made no allocator of symmetric memory");
  // The cast is valid because every class from CUDAAllocator's own up to c10::Allocator has one
  // base, at offset 0. The pointer owns nothing, because `kept` is never destroyed.
  return std::shared_ptr<c10::Allocator>(
      std::shared_ptr<void>(), static_cast<c10::Allocator*>(caster.value));
}

std::optional<at::Device> sharing_device(at::Device device) {
  if (!device.is_cuda() || !c10::impl::hasDeviceGuardImpl(at::kCUDA)) {
    return std::nullopt;
  }
  const auto* const interface = c10::impl::getDeviceGuardImpl(at::kCUDA);
  if (interface->deviceCount() == 0) {
    return std::nullopt;
  }
  if (!device.has_index()) {
    device = interface->getDevice();
  }
  if (device.index() >= interface->deviceCount() || !supports_symm_mem(device.index())) {
    return std::nullopt;
  }
  return device;
}

PoolRef::~PoolRef() {
  // While the interpreter ends, a thread without the GIL can no longer get it; the process then
  // keeps the pool.
  if (Py_IsInitialized() && PyGILState_Check()) {
    let_go();
  }
}

at::Tensor PoolRef::allocate(int64_t count, const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(options.has_device(), "allocate_tensor: the device is missing");
  TORCH_CHECK_VALUE(count >= 0, "allocate_tensor: ", count, " elements cannot be allocated");
  const auto device = sharing_device(options.device());
  TORCH_CHECK_NOT_IMPLEMENTED(
      device, "allocate_tensor: ", options.device(),
      " cannot have symmetric memory; supports_tensor_alloc() tells");
  const py::gil_scoped_acquire gil;
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  holds_ = true;
  return python("allocate")(reinterpret_cast<uintptr_t>(this), count, dtype, *device)
      .cast<at::Tensor>();
}

void PoolRef::let_go() {
  if (!holds_.exchange(false)) {
    return;
  }
  const py::gil_scoped_acquire gil;
  try {
    python("let_go")(reinterpret_cast<uintptr_t>(this));
  } catch (py::error_already_set& error) {
    // Modules may already be torn down at interpreter exit.
    error.discard_as_unraisable("symm: letting go of a memory pool");
  }
}

} // namespace symm
