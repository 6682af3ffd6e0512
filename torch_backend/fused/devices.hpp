// Operators reject tensors on several devices, even if one of them has no memory (the meta device).
#pragma once

#include <ATen/ATen.h>

namespace symm {

// Raises a ValueError that names both arguments and both devices, unless the devices are equal.
inline void check_same_device(
    const char* op,
    const char* name,
    const at::Tensor& tensor,
    const char* other_name,
    const at::Tensor& other) {
  TORCH_CHECK_VALUE(
      tensor.device() == other.device(),
      op, ": ", name, " is on ", tensor.device(), ", ", other_name, " on ", other.device(),
      "; move them to one device");
}

} // namespace symm
