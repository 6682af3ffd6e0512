// A backend of somebody else's, such as Gloo, as the core's rail between hosts.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <deque>
#include <functional>
#include <string>

#include "symm/src/bridge.rs.h"
#include "symm_bridge.hpp"

namespace symm {

// Makes a backend: whose ("gloo"), its name, store, rank, size and timeout. May be called on any thread.
using MakeBackend = std::function<c10::intrusive_ptr<::c10d::Backend>(
    const std::string& engine,
    const std::string& name,
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout)>;

// Sets what makes backends between hosts. Headers of Gloo and NCCL are in no wheel of torch: Python makes them.
void make_backends_with(MakeBackend make);

// A backend that joins `name` of the group `group`; throws what Python or the backend throws.
c10::intrusive_ptr<::c10d::Backend> made_backend(
    const std::string& group,
    const std::string& name,
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    const std::string& engine = "gloo");

// Status of the exception under way, as a backend's failure: whatever it is, the other hosts cannot be reached by it any more.
Status backend_failure() noexcept;

// Outcome of `body`.
template <typename Body>
Status attempted(Body&& body) noexcept {
  try {
    body();
    return {Kind::None, {}};
  } catch (...) {
    return backend_failure();
  }
}

// One rail: bytes go through a tensor of its own, which a transfer that was given up keeps alive as long as the backend uses it.
class BackendRail final : public RailHandle {
 public:
  BackendRail(std::string group, c10::intrusive_ptr<::c10d::Store> store) : group_(std::move(group)), store_(std::move(store)) {}

  Status make(rust::Str name, size_t host, size_t hosts, int64_t timeout_ms) const noexcept override;
  Status staging(size_t bytes, size_t& address) const noexcept override;
  Status all_gather(size_t from, size_t each, size_t to, int64_t timeout_ms) const noexcept override;
  Status all_to_all(
      size_t from,
      rust::Slice<const size_t> sent,
      size_t to,
      rust::Slice<const size_t> received,
      int64_t timeout_ms) const noexcept override;
  Status broadcast(size_t root, size_t at, size_t bytes, int64_t timeout_ms) const noexcept override;
  Status wait(int64_t limit_ms) const noexcept override;

 private:
  at::Tensor part(size_t at, size_t bytes) const;

  std::string group_;
  c10::intrusive_ptr<::c10d::Store> store_;
  // Set by functions that the core calls one after another.
  mutable c10::intrusive_ptr<::c10d::Backend> backend_;
  mutable at::Tensor staging_;
  // What is under way, the oldest first.
  mutable std::deque<c10::intrusive_ptr<::c10d::Work>> works_;
  mutable size_t hosts_ = 0;
};

} // namespace symm
