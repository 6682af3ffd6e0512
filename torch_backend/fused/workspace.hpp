// The memory through which the ranks of a group exchange shards and parts of fused matmuls, and
// when it may be reused.
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

// The operator-specific part of a call.
class FusedOperator {
 public:
  virtual ~FusedOperator() = default;
  // Starts the call in the core.
  virtual FusedCall begin(FusedWorkspace& core, uint64_t capture) = 0;
  // Runs before the first step.
  virtual void prepare(const FusedCall& call) = 0;
  // Enqueues a step on the current stream: one of Share, Fetch, OwnRows, Multiply and Sum.
  virtual void enqueue(const FusedStep& step) = 0;
};

// The memory through which the ranks of a group exchange shards and parts of fused matmuls on one
// device. Calls take turns, which src/fused/workspace.rs tracks.
class Workspace {
 public:
  // Returns the workspace of the group with this name, made on first use and released with the
  // group.
  static std::shared_ptr<Workspace> of(const std::string& group_name, at::Device device);
  // Releases the workspaces of groups that have ended, and the workspaces of `group_name`.
  static void drop(const std::string& group_name);

  Workspace(
      std::string group_name, at::Device device,
      const c10::intrusive_ptr<::c10d::ProcessGroup>& group);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  at::Device device() const {
    return streams_.device();
  }

  // Enqueues a call, at whose end the caller's stream waits for the other stream. If the workspace
  // is too small, first makes a larger one, which waits for the device and all ranks, and throws
  // during a capture.
  void run(FusedOperator& op);

  // Returns a matrix in the piece of `rank` that `call` uses, `bytes` behind its start.
  at::Tensor matrix(
      size_t rank, const FusedCall& call, size_t bytes, at::IntArrayRef sizes,
      at::ScalarType dtype) const;
  // Returns the caller's `CUstream` of the current call; 0 on the CPU.
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
  // Earlier windows that graphs use.
  std::vector<std::pair<at::Tensor, Window>> kept_;
  at::Tensor memory_;
  Window window_;
};

} // namespace symm
