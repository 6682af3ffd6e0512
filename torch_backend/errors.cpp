#include "errors.hpp"

#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace symm {

namespace {

template <typename E>
std::exception_ptr make(const Status& status) {
  return std::make_exception_ptr(
      E({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::string(status.message)));
}

// The exception of a signal handler that was raised while this thread waited in the core. A plain
// pointer, because the end of a thread must not destroy it: Python may have ended before.
thread_local std::exception_ptr* interrupt = nullptr;

void keep_interrupt(std::exception_ptr error) {
  const std::unique_ptr<std::exception_ptr> earlier(
      std::exchange(interrupt, new std::exception_ptr(std::move(error))));
}

class PythonSignals final : public InterruptHandle {
 public:
  bool is_pending() const noexcept override {
    if (!Py_IsInitialized()) {
      return false;
    }
    const pybind11::gil_scoped_acquire gil;
    // A handler may call the core itself. It must not get an exception that an earlier handler
    // raised in the wait that it interrupts.
    auto* const earlier = std::exchange(interrupt, nullptr);
    if (PyErr_CheckSignals() == 0) {
      interrupt = earlier;
      return false;
    }
    const std::unique_ptr<std::exception_ptr> replaced(earlier);
    python_error error;
    error.persist();
    keep_interrupt(std::make_exception_ptr(std::move(error)));
    return true;
  }
};

// Python exception types by the code of the kind.
std::array<PyObject*, 11> types{};

} // namespace

void set_python_type(ErrorKind kind, PyObject* type) {
  types.at(static_cast<size_t>(kind)) = type;
}

PyObject* CoreError::python_type() {
  return types.at(static_cast<size_t>(kind_));
}

std::exception_ptr exception_of(const Status& status) {
  switch (status.kind) {
    case ErrorKind::None:
      return nullptr;
    case ErrorKind::Peer:
    case ErrorKind::Timeout:
    case ErrorKind::Mismatch:
    case ErrorKind::Config:
    case ErrorKind::Aborted:
      return std::make_exception_ptr(CoreError(status.kind, status));
    case ErrorKind::WaitTimeout:
      return std::make_exception_ptr(CoreError(ErrorKind::Timeout, status));
    case ErrorKind::Value:
      return make<c10::ValueError>(status);
    case ErrorKind::Type:
      return make<c10::TypeError>(status);
    case ErrorKind::NotImplemented:
      return make<c10::NotImplementedError>(status);
    case ErrorKind::Network:
      return make<c10::DistNetworkError>(status);
    case ErrorKind::QueueEmpty:
    case ErrorKind::Internal:
      break;
  }
  return make<c10::DistBackendError>(status);
}

bool timed_out(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CoreError& failure) {
    return failure.kind() == ErrorKind::Timeout;
  } catch (...) {
    return false;
  }
}

std::unique_ptr<InterruptHandle> python_signals() {
  return std::make_unique<PythonSignals>();
}

void rethrow_interrupt() {
  if (interrupt != nullptr) {
    const std::unique_ptr<std::exception_ptr> raised(std::exchange(interrupt, nullptr));
    std::rethrow_exception(*raised);
  }
}

void handle_signals() {
  // As in src/sys/interrupt.rs. Another thread runs no handlers, and must not request the GIL of an
  // interpreter that is ending.
  if (syscall(SYS_gettid) == getpid()) {
    PythonSignals().is_pending();
  }
  rethrow_interrupt();
}

bool is_python_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const python_error&) {
    return true;
  } catch (...) {
    return false;
  }
}

void check(const Status& status) {
  rethrow_interrupt();
  if (status.kind != ErrorKind::None) {
    std::rethrow_exception(exception_of(status));
  }
}

void check_store(const Status& status) {
  rethrow_interrupt();
  switch (status.kind) {
    case ErrorKind::None:
      return;
    case ErrorKind::Network:
      std::rethrow_exception(make<c10::DistNetworkError>(status));
    case ErrorKind::QueueEmpty:
      std::rethrow_exception(make<c10::DistQueueEmptyError>(status));
    case ErrorKind::Value:
    case ErrorKind::Type:
    case ErrorKind::NotImplemented:
      std::rethrow_exception(exception_of(status));
    case ErrorKind::Peer:
    case ErrorKind::Timeout:
    case ErrorKind::Mismatch:
    case ErrorKind::Config:
    case ErrorKind::Aborted:
    case ErrorKind::WaitTimeout:
    case ErrorKind::Internal:
      break;
  }
  std::rethrow_exception(make<c10::DistStoreError>(status));
}

Status status_of_store(const std::exception_ptr& error) {
  auto status = status_of(error);
  if (status.kind == ErrorKind::Aborted) {
    // torch's interface wraps a store of this package, whose `check_store` threw this exception.
    keep_interrupt(error);
  }
  return status;
}

Status status_of(const std::exception_ptr& error) {
  const auto status = [](ErrorKind kind, const char* message) {
    return Status{kind, rust::String::lossy(message)};
  };
  try {
    std::rethrow_exception(error);
  } catch (const python_error& e) {
    return status(ErrorKind::Aborted, e.what());
  } catch (const c10::DistQueueEmptyError& e) {
    return status(ErrorKind::QueueEmpty, e.what_without_backtrace());
  } catch (const c10::DistStoreError& e) {
    return status(ErrorKind::Timeout, e.what_without_backtrace());
  } catch (const c10::DistNetworkError& e) {
    return status(ErrorKind::Network, e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    return status(ErrorKind::NotImplemented, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    return status(ErrorKind::Value, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    return status(ErrorKind::Type, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    return status(ErrorKind::Config, e.what_without_backtrace());
  } catch (const std::exception& e) {
    return status(ErrorKind::Config, e.what());
  } catch (...) {
    return status(ErrorKind::Config, "an unknown exception");
  }
}

} // namespace symm
