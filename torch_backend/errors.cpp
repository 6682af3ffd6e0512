#include "errors.hpp"

#include <c10/util/Exception.h>

#include <array>

namespace symm {

namespace {

template <typename E>
std::exception_ptr make(const Status& status) {
  return std::make_exception_ptr(E({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::string(status.message)));
}

// By the code of the kind.
std::array<PyObject*, 11> types{};

} // namespace

void set_python_type(Kind kind, PyObject* type) {
  types.at(static_cast<size_t>(kind)) = type;
}

PyObject* Failure::python_type() {
  return types.at(static_cast<size_t>(kind_));
}

std::exception_ptr exception_of(const Status& status) {
  if (status.kind == 0) {
    return nullptr;
  }
  const auto kind = static_cast<Kind>(status.kind);
  switch (kind) {
    case Kind::Peer:
    case Kind::Timeout:
    case Kind::Mismatch:
    case Kind::Config:
    case Kind::Aborted:
      return std::make_exception_ptr(Failure(kind, status));
    case Kind::WaitTimeout:
      return std::make_exception_ptr(Failure(Kind::Timeout, status));
    case Kind::Value:
      return make<c10::ValueError>(status);
    case Kind::Type:
      return make<c10::TypeError>(status);
    case Kind::NotImplemented:
      return make<c10::NotImplementedError>(status);
    case Kind::Internal:
      break;
  }
  return make<c10::DistBackendError>(status);
}

void check(const Status& status) {
  if (status.kind != 0) {
    std::rethrow_exception(exception_of(status));
  }
}

} // namespace symm
