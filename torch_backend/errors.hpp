// Failures of the core, for C++ and Python.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <memory>
#include <string>

#include "symm/src/bridge.rs.h"
#include "symm_bridge.hpp"

namespace symm {

// A failure of a kind that has its own Python exception. Not derived from c10::DistBackendError:
// where torch calls Python without pybind11, as in a backward pass, it turns every such class into
// the plain DistBackendError.
class CoreError final : public torch::PyTorchError {
 public:
  CoreError(ErrorKind kind, const Status& status)
      : PyTorchError(std::string(status.message)), kind_(kind) {}
  PyObject* python_type() override;
  ErrorKind kind() const {
    return kind_;
  }

 private:
  ErrorKind kind_;
};

// Sets the result of `python_type` for `kind`; the caller keeps `type` alive forever.
void set_python_type(ErrorKind kind, PyObject* type);

// Returns the exception for a failed status of a group; null for success.
std::exception_ptr exception_of(const Status& status);

// Returns true if the exception of a call says that its deadline passed.
bool timed_out(const std::exception_ptr& error);

// Throws unless the status of a group is success and no signal handler has raised.
void check(const Status& status);

// If a signal handler raised an exception while this thread waited in the core, throws that
// exception. The call has failed because of it, or has ended while the handler ran.
void rethrow_interrupt();

// Runs the handlers of signals that have arrived, and throws what one raises. Only Python's main
// thread runs handlers.
void handle_signals();

// Returns true for an exception of a signal handler.
bool is_python_error(const std::exception_ptr& error);

// Throws unless the status of a store is success. The exception classes are those of torch's
// stores, for code that catches them.
void check_store(const Status& status);

// Makes the handle through which the core checks for Python signals while it waits
// (src/sys/interrupt.rs). The call throws whatever a signal handler raises.
std::unique_ptr<InterruptHandle> python_signals();

// Returns the status for an exception of a c10d::Store. c10d uses DistStoreError for timeouts; an
// exception of a class that has no kind becomes Config.
Status status_of(const std::exception_ptr& error);

// As `status_of`, for an exception that passes through the core. Keeps a Python exception, which
// `check` or `check_store` of the core call that fails because of it rethrows.
Status status_of_store(const std::exception_ptr& error);

} // namespace symm
