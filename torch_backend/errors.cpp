#include "errors.hpp"

#include <string>

namespace symm {

namespace {

// The codes of error::Kind in src/error.rs.
enum Kind : uint8_t {
  kPeer = 1,
  kTimeout = 2,
  kMismatch = 3,
  kConfig = 4,
  kAborted = 5,
  kValue = 6,
  kType = 7,
  kNotImplemented = 8,
  kWaitTimeout = 9,
  kInternal = 10,
};

template <typename E>
std::exception_ptr make(const Status& status) {
  return std::make_exception_ptr(
      E({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::string(status.message)));
}

} // namespace

std::exception_ptr exception_of(const Status& status) {
  switch (status.kind) {
    case 0:
      return nullptr;
    case kPeer:
      return make<PeerError>(status);
    case kTimeout:
    case kWaitTimeout:
      return make<TimeoutError>(status);
    case kMismatch:
      return make<MismatchError>(status);
    case kConfig:
      return make<ConfigError>(status);
    case kAborted:
      return make<AbortedError>(status);
    case kValue:
      return make<c10::ValueError>(status);
    case kType:
      return make<c10::TypeError>(status);
    case kNotImplemented:
      return make<c10::NotImplementedError>(status);
    case kInternal:
    default:
      return make<c10::DistBackendError>(status);
  }
}

void check(const Status& status) {
  if (status.kind != 0) {
    std::rethrow_exception(exception_of(status));
  }
}

} // namespace symm
