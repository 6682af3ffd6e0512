// All differences between the torch versions that this directory compiles against (2.11 to 2.15).
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

// Returns the `CUstream`, without linking against CUDA.
inline size_t native_stream(
    const c10::impl::DeviceGuardImplInterface& device, const c10::Stream& stream) {
  return reinterpret_cast<size_t>(device.getStreamNativeHandle(stream));
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
// Sets that request where torch has it; the last argument is 0.
template <typename Options>
auto set_reconfigurable(Options& options, bool value, int)
    -> decltype(void(options.enable_reconfigure = value)) {
  options.enable_reconfigure = value;
}
template <typename Options>
void set_reconfigurable(Options&, bool, long) {}

} // namespace symm
