// Exceptions of the core, as C++ and Python see them.
#pragma once

#include <c10/util/Exception.h>

#include <exception>

#include "symm/src/bridge.rs.h"

namespace symm {

struct PeerError : c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};
struct TimeoutError : c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};
struct MismatchError : c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};
struct ConfigError : c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};
struct AbortedError : c10::DistBackendError {
  using c10::DistBackendError::DistBackendError;
};

// The exception for a failed status; null for success.
std::exception_ptr exception_of(const Status& status);

// Throws unless the status is success.
void check(const Status& status);

} // namespace symm
