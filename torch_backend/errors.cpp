#include "errors.hpp"

#include <c10/util/Exception.h>

#include <array>
#include <utility>

namespace symm {

namespace {

template <typename E>
std::exception_ptr make(const Status& status) {
  return std::make_exception_ptr(E({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::string(status.message)));
}

// The exception of a signal handler that was raised while this thread waited in the core.
thread_local std::exception_ptr interrupt;

class PythonSignals final : public InterruptHandle {
 public:
  bool raised() const noexcept override {
    if (!Py_IsInitialized()) {
      return false;
    }
    const pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) {
      return false;
    }
    python_error error;
    error.persist();
    interrupt = std::make_exception_ptr(std::move(error));
    return true;
  }
};

// Python exception types by the code of the kind.
std::array<PyObject*, 11> types{};

} // namespace

void set_python_type(Kind kind, PyObject* type) {
  types.at(static_cast<size_t>(kind)) = type;
}

PyObject* Failure::python_type() {
  return types.at(static_cast<size_t>(kind_));
}

std::exception_ptr exception_of(const Status& status) {
  switch (status.kind) {
    case Kind::None:
      return nullptr;
    case Kind::Peer:
    case Kind::Timeout:
    case Kind::Mismatch:
    case Kind::Config:
    case Kind::Aborted:
      return std::make_exception_ptr(Failure(status.kind, status));
    case Kind::WaitTimeout:
      return std::make_exception_ptr(Failure(Kind::Timeout, status));
    case Kind::Value:
      return make<c10::ValueError>(status);
    case Kind::Type:
      return make<c10::TypeError>(status);
    case Kind::NotImplemented:
      return make<c10::NotImplementedError>(status);
    case Kind::Network:
      return make<c10::DistNetworkError>(status);
    case Kind::QueueEmpty:
    case Kind::Internal:
      break;
  }
  return make<c10::DistBackendError>(status);
}

bool timed_out(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Failure& failure) {
    return failure.kind() == Kind::Timeout;
  } catch (...) {
    return false;
  }
}

std::unique_ptr<InterruptHandle> python_signals() {
  return std::make_unique<PythonSignals>();
}

void rethrow_interrupt() {
  if (interrupt) {
    std::rethrow_exception(std::exchange(interrupt, nullptr));
  }
}

void check(const Status& status) {
  if (status.kind != Kind::None) {
    rethrow_interrupt();
    std::rethrow_exception(exception_of(status));
  }
}

void check_store(const Status& status) {
  if (status.kind == Kind::None) {
    return;
  }
  rethrow_interrupt();
  switch (status.kind) {
    case Kind::None:
      return;
    case Kind::Network:
      std::rethrow_exception(make<c10::DistNetworkError>(status));
    case Kind::QueueEmpty:
      std::rethrow_exception(make<c10::DistQueueEmptyError>(status));
    case Kind::Value:
    case Kind::Type:
    case Kind::NotImplemented:
      std::rethrow_exception(exception_of(status));
    case Kind::Peer:
    case Kind::Timeout:
    case Kind::Mismatch:
    case Kind::Config:
    case Kind::Aborted:
    case Kind::WaitTimeout:
    case Kind::Internal:
      break;
  }
  std::rethrow_exception(make<c10::DistStoreError>(status));
}

Status status_of_store(const std::exception_ptr& error) {
  auto status = status_of(error);
  if (status.kind == Kind::Aborted) {
    // From `check_store` further down the stack: a store of this package behind torch's interface.
    interrupt = error;
  }
  return status;
}

Status status_of(const std::exception_ptr& error) {
  const auto status = [](Kind kind, const char* message) {
    return Status{kind, rust::String::lossy(message)};
  };
  try {
    std::rethrow_exception(error);
  } catch (const python_error& e) {
    return status(Kind::Aborted, e.what());
  } catch (const c10::DistQueueEmptyError& e) {
    return status(Kind::QueueEmpty, e.what_without_backtrace());
  } catch (const c10::DistStoreError& e) {
    return status(Kind::Timeout, e.what_without_backtrace());
  } catch (const c10::DistNetworkError& e) {
    return status(Kind::Network, e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    return status(Kind::NotImplemented, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    return status(Kind::Value, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    return status(Kind::Type, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    return status(Kind::Config, e.what_without_backtrace());
  } catch (const std::exception& e) {
    return status(Kind::Config, e.what());
  } catch (...) {
    return status(Kind::Config, "an unknown exception");
  }
}

} // namespace symm
