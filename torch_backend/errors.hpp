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

 private:
  Kind kind_;
};

// Sets what `python_type` returns for `kind`; the caller keeps `type` alive for ever.
void set_python_type(Kind kind, PyObject* type);

// The exception for a failed status of a group; null for success.
std::exception_ptr exception_of(const Status& status);

// Throws unless the status of a group is success.
void check(const Status& status);

// Throws unless the status of a store is success. The classes are those of torch's stores, for the sake of code that catches them.
void check_store(const Status& status);

// Handle by which the core learns of Python's signals while it waits (src/sys/interrupt.rs). What a handler raises comes out of the call.
std::unique_ptr<InterruptHandle> python_signals();

// The status for an exception of a c10d::Store. c10d's name for a timeout is DistStoreError; what has no kind here is Config.
Status status_of(const std::exception_ptr& error);

} // namespace symm
