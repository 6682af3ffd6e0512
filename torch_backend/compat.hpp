// Every difference between the versions of torch that this folder compiles against (2.10 to 2.15).
#pragma once

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

// 2.15: torch clones the options of a parent for split() and merge().
#define SYMM_OPTIONS_CLONE (TORCH_VERSION_MINOR >= 15)

// 2.11: options carry a description of the group.
inline void copy_description(const ::c10d::Backend::Options& from, ::c10d::Backend::Options& to) {
#if TORCH_VERSION_MINOR >= 11
  to.group_desc = from.group_desc;
#else
  static_cast<void>(from);
  static_cast<void>(to);
#endif
}

} // namespace symm
