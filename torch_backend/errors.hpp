// Failures of the core, as C++ and Python see them.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <memory>
#include <string>

#include "symm/src/bridge.rs.h"
#include "symm_bridge.hpp"

namespace symm {

// A failure of the kinds that have a Python exception of their own. Not a c10::DistBackendError: where torch calls Python back
// without pybind11, as from a backward pass, it would turn every class derived from that into the plain DistBackendError.
class Failure final : public torch::PyTorchError {
 public:
  Failure(Kind kind, const Status& status) : PyTorchError(std::string(status.message)), kind_(kind) {}
  PyObject* python_type() override;
  Kind kind() const {
    return kind_;
  }

 private:
  Kind kind_;
};

// Sets what `python_type` returns for `kind`; the caller keeps `type` alive for ever.
void set_python_type(Kind kind, PyObject* type);

// The exception for a failed status of a group; null for success.
std::exception_ptr exception_of(const Status& status);

// Whether the exception of a call says that its deadline passed.
bool timed_out(const std::exception_ptr& error);

// Throws unless the status of a group is success.
void check(const Status& status);

// Throws what a signal's handler has raised while this thread waited in the core, if one has: the call that failed has failed because of it.
void rethrow_interrupt();

// Throws unless the status of a store is success. The classes are those of torch's stores, for the sake of code that catches them.
void check_store(const Status& status);

// Handle by which the core learns of Python's signals while it waits (src/sys/interrupt.rs). What a handler raises comes out of the call.
std::unique_ptr<InterruptHandle> python_signals();

// The status for an exception of a c10d::Store. c10d's name for a timeout is DistStoreError; what has no kind here is Config.
Status status_of(const std::exception_ptr& error);

// The same of an exception that the core will see: one of Python's comes out of the call of the core that fails because of it.
Status status_of_store(const std::exception_ptr& error);

} // namespace symm
