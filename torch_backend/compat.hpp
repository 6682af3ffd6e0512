// Every difference between the versions of torch that this folder compiles against (2.10 to 2.15).
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/version.h>

namespace symm {

// Renamed in 2.13, with an alias; the factor of PREMUL_SUM.
#if TORCH_VERSION_MINOR >= 13
using PremulSumSupplement = ::c10d::PreMulSumSupplement;
#else
using PremulSumSupplement = ::c10d::NCCLPreMulSumSupplement;
#endif

// Gives the options of a new group the names in the options torch passes. 2.11 added the description.
inline void copy_names(const ::c10d::Backend::Options& from, ::c10d::Backend::Options& to) {
  to.group_name = from.group_name;
#if TORCH_VERSION_MINOR >= 11
  to.group_desc = from.group_desc;
#endif
}

// The `CUstream`; what asks for it without linking against CUDA came with 2.11.
inline size_t native_stream(const c10::impl::DeviceGuardImplInterface& device, const c10::Stream& stream) {
#if TORCH_VERSION_MINOR >= 11
  return reinterpret_cast<size_t>(device.getStreamNativeHandle(stream));
#else
  static_cast<void>(device);
  static_cast<void>(stream);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "CUDA tensors are served with torch 2.11 or newer; use \"cpu:symm,cuda:nccl\"");
#endif
}

// Options::clone() came with 2.14; without an override a copy would be of the base's type.
#if TORCH_VERSION_MINOR >= 14
#define SYMM_OVERRIDE_CLONE override
#else
#define SYMM_OVERRIDE_CLONE
#endif

// Backend::gather_single() came with 2.14.
#if TORCH_VERSION_MINOR >= 14
#define SYMM_OVERRIDE_GATHER_SINGLE override
#else
#define SYMM_OVERRIDE_GATHER_SINGLE
#endif

// SymmetricMemoryAllocator::has_allocation() came with 2.12.
#if TORCH_VERSION_MINOR >= 12
#define SYMM_OVERRIDE_HAS_ALLOCATION override
#else
#define SYMM_OVERRIDE_HAS_ALLOCATION
#endif

// Work::getTimeout() and Backend::addEphemeralTimeout() are in 2.14, not yet in 2.13.
#if TORCH_VERSION_MINOR >= 14
#define SYMM_OVERRIDE_TIMEOUTS override
#else
#define SYMM_OVERRIDE_TIMEOUTS
#endif

// True if the options ask for a group whose members a later call names: 2.15 can, 2.13 cannot.
template <typename Options>
auto reconfigurable(const Options& options) -> decltype(options.enable_reconfigure) {
  return options.enable_reconfigure;
}
inline bool reconfigurable(...) {
  return false;
}

} // namespace symm
