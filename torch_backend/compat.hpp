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

} // namespace symm
