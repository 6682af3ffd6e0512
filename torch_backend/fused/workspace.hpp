// Memory through which the ranks of a group exchange shards and parts of matrix products, and when it may be written again.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fused/streams.hpp"
#include "symm/src/bridge/fused.rs.h"

namespace symm {

// What one operator does in a call, beside what all do.
class FusedOperator {
 public:
  virtual ~FusedOperator() = default;
  // Begins the call in the core.
  virtual FusedCall begin(FusedWorkspace& core, uint64_t capture) = 0;
  // Comes before the first step.
  virtual void prepare(const FusedCall& call) = 0;
  // Puts what the step does into the current stream: one of Share, Fetch, OwnRows, Multiply and Sum.
  virtual void enqueue(const FusedStep& step) = 0;
};

// Memory through which the ranks of a group exchange shards and parts of matrix products on one device. Calls take turns, of which
// src/fused/workspace.rs keeps account.
class Workspace {
 public:
  // Workspace of the group with this name, made when it is first asked for, and given up with the group.
  static std::shared_ptr<Workspace> of(const std::string& group_name, at::Device device);
  // Gives up those whose group is no more, and that of `group_name`.
  static void drop(const std::string& group_name);

  Workspace(std::string group_name, at::Device device, const c10::intrusive_ptr<::c10d::ProcessGroup>& group);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  at::Device device() const {
    return streams_.device();
  }

  // Enqueues a call; all streams have met in the caller's then. A workspace that is too small is made anew, which waits for the device and
  // for all ranks, and is refused while a graph is recorded.
  void run(FusedOperator& op);

  // A matrix in the piece of `rank` that `call` uses, `bytes` behind its begin.
  at::Tensor matrix(size_t rank, const FusedCall& call, size_t bytes, at::IntArrayRef sizes, at::ScalarType dtype) const;
  // The caller's `CUstream` in the call at hand; 0 on the CPU.
  size_t stream() const {
    return streams_.handle();
  }

 private:
  using Window = c10::intrusive_ptr<::c10d::symmetric_memory::SymmetricMemory>;

  FusedCall begin(FusedOperator& op);
  void make(const FusedCall& call);
  void enqueue(const FusedStep& step, FusedOperator& op);
  void abandon() noexcept;

  const std::string group_name_;
  const c10::weak_intrusive_ptr<::c10d::ProcessGroup> group_;
  const int rank_;
  const int size_;
  std::mutex mutex_;
  CallStreams streams_;
  rust::Box<FusedWorkspace> core_;
  // The windows before, where graphs use them.
  std::vector<std::pair<at::Tensor, Window>> kept_;
  at::Tensor memory_;
  Window window_;
};

} // namespace symm
