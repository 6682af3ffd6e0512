// Inter-node backends, such as Gloo. Python creates them, because torch's wheels have no headers of
// Gloo and NCCL.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "symm/src/bridge.rs.h"
#include "symm/src/bridge/transport.rs.h"
#include "symm_bridge.hpp"

namespace symm {

// An inter-node backend, and the objects that must live as long as it.
using BackendPtr = std::shared_ptr<::c10d::Backend>;

// Functions of Python, which any thread may call.
struct BackendFactories {
  // Creates a backend of the kind `backend` ("gloo") for tensors of the GPU `device`, or of the CPU
  // if `device` is -1.
  std::function<BackendPtr(
      const std::string& backend,
      const std::string& name,
      const c10::intrusive_ptr<::c10d::Store>& store,
      int rank,
      int size,
      std::chrono::milliseconds timeout,
      int device)>
      make;
  // Returns the backends for CPU and for CUDA tensors that the user's `choice` selects. Throws if
  // it selects none; the message lists the known backends.
  std::function<std::pair<std::string, std::string>(const std::string& choice)> find;
};

void set_backend_factories(BackendFactories factories);
const BackendFactories& backend_factories();

// Returns a status that says that a backend can no longer reach the other nodes, with the text of
// the current exception.
Status backend_failure() noexcept;

// Runs `body` and returns its outcome; an exception becomes `backend_failure`.
template <typename Body>
Status attempted(Body&& body) noexcept {
  try {
    body();
    return {ErrorKind::None, {}};
  } catch (...) {
    return backend_failure();
  }
}

// Returns the part `name` of `store` through which the ranks of a backend connect. Waiting in it
// fails once `given_up`, which is called from time to time, returns true. If `patient`, it never
// times out.
c10::intrusive_ptr<::c10d::Store> meeting_store(
    const std::string& name,
    c10::intrusive_ptr<::c10d::Store> store,
    std::function<bool()> given_up,
    bool patient = false);

} // namespace symm
