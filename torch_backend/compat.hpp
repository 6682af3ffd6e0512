// All differences between the torch versions that this directory compiles against (2.10 to 2.15).
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/version.h>

namespace symm {

// The factor of PREMUL_SUM. torch 2.13 renamed the type and kept the old name as an alias.
#if TORCH_VERSION_MINOR >= 13
using PremulSumSupplement = ::c10d::PreMulSumSupplement;
#else
using PremulSumSupplement = ::c10d::NCCLPreMulSumSupplement;
#endif

// Copies the names in torch's options to the options of a new group. 2.11 added the description.
inline void copy_names(const ::c10d::Backend::Options& from, ::c10d::Backend::Options& to) {
  to.group_name = from.group_name;
#if TORCH_VERSION_MINOR >= 11
  to.group_desc = from.group_desc;
#endif
}

// Returns the `CUstream`. 2.11 added a query that does not link against CUDA.
inline size_t native_stream(
    const c10::impl::DeviceGuardImplInterface& device, const c10::Stream& stream) {
#if TORCH_VERSION_MINOR >= 11
  return reinterpret_cast<size_t>(device.getStreamNativeHandle(stream));
#else
  static_cast<void>(device);
  static_cast<void>(stream);
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "CUDA tensors are served with torch 2.11 or newer; use \"cpu:symm,cuda:nccl\"");
#endif
}

// Options::clone() was added in 2.14; without an override, a copy would have the base type.
#if TORCH_VERSION_MINOR >= 14
#define SYMM_OVERRIDE_CLONE override
#else
#define SYMM_OVERRIDE_CLONE
#endif

// Backend::gather_single() was added in 2.14.
#if TORCH_VERSION_MINOR >= 14
#define SYMM_OVERRIDE_GATHER_SINGLE override
#else
#define SYMM_OVERRIDE_GATHER_SINGLE
#endif

// SymmetricMemoryAllocator::has_allocation() was added in 2.12.
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

// True if the options request a group whose members are named by a later call, which 2.15 supports
// and 2.13 does not.
template <typename Options>
auto reconfigurable(const Options& options) -> decltype(options.enable_reconfigure) {
  return options.enable_reconfigure;
}
inline bool reconfigurable(...) {
  return false;
}

} // namespace symm
