// Backends of somebody else's, such as Gloo, that connect nodes: engines. Headers of Gloo and NCCL are in no wheel of torch: Python makes them.
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

// An engine, and what it needs to live as long.
using BackendPtr = std::shared_ptr<::c10d::Backend>;

// What Python does. Both may be called on any thread.
struct BackendFactories {
  // Makes one: whose ("gloo"), its name, store, rank, size and timeout, and the GPU whose tensors it is for, or -1.
  std::function<BackendPtr(
      const std::string& engine,
      const std::string& name,
      const c10::intrusive_ptr<::c10d::Store>& store,
      int rank,
      int size,
      std::chrono::milliseconds timeout,
      int device)>
      make;
  // Names of those of CPU and of CUDA tensors that a choice of the user's stands for. Throws what there is, where it stands for none.
  std::function<std::pair<std::string, std::string>(const std::string& choice)> find;
};

void set_backend_factories(BackendFactories engines);
const BackendFactories& engines();

// Status of the exception under way, as a backend's failure: whatever it is, the other nodes cannot be reached by it any more.
Status backend_failure() noexcept;

// Outcome of `body`.
template <typename Body>
Status attempted(Body&& body) noexcept {
  try {
    body();
    return {ErrorKind::None, {}};
  } catch (...) {
    return backend_failure();
  }
}

// The part `name` of `store`, where the ranks of an engine meet. Waiting there ends with an error once the core has given up.
c10::intrusive_ptr<::c10d::Store> meeting_store(
    const std::string& name,
    c10::intrusive_ptr<::c10d::Store> store,
    std::optional<rust::Box<GivenUp>> given_up = std::nullopt);

} // namespace symm
