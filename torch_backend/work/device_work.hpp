// The handle of calls on a CUDA device: their position in stream order.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <optional>
#include <vector>

#include "process_group/operation.hpp"
#include "symm/src/bridge.rs.h"
#include "work/device_streams.hpp"
#include "work/work.hpp"

namespace symm {

// The work of one call or of a coalesced block. It first gathers calls; once launched, they run on
// one stream.
//
// Background calls (async_op=True) run on another stream than the caller's and use tensors that the
// allocator does not track there: the work owns the tensors until some stream waits for the work.
// If no stream waits, the work reports the use to the allocator when it is dropped.
class DeviceWork final : public ::c10d::Work {
 public:
  // `operation` determines how a profiler sees the work; it must be added like any other.
  DeviceWork(
      int rank, Group group, std::shared_ptr<DeviceStreams> streams, const Operation& operation,
      uint64_t sequence);
  // Makes the work of a coalesced block.
  DeviceWork(int rank, Group group, std::shared_ptr<DeviceStreams> streams, uint64_t sequence);
  ~DeviceWork() override;
  // Reports the use of the tensors to the allocator if no stream has waited, and releases them. c10
  // calls this instead of the destructor while `TimeoutExtensions` still refers to this work.
  void release_resources() override;

  // Adds a collective; returns false if the work was launched before. A `timeout` that is not
  // positive stands for the group's timeout.
  bool add(
      const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout,
      bool background);
  // Adds a send or receive, always on another stream than the caller's, because c10d does not say
  // whether the caller will wait.
  bool add(const std::shared_ptr<Operation>& operation, const MessageSpec& transfer);
  // Enqueues the calls that were added, after the present work on the calling thread's stream; has
  // no effect after the first time. Throws if the core rejects the calls, and then stores that
  // error.
  void launch();
  // Returns true if a send or receive was added.
  bool has_transfers() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return !transfers_.empty();
  }
  at::Device device() const {
    return streams_->device();
  }

  // Returns true if the device has finished, without waiting. True for calls recorded into a graph,
  // which run when the graph is replayed.
  bool isCompleted() override;
  bool isSuccess() const override;
  // Returns the group's failure, if the group failed before the work was seen complete.
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  // Makes the calling thread's stream wait; the host continues.
  void synchronize() override;
  void blockCurrentStream() override {
    synchronize();
  }
  // Makes the current stream wait. Also blocks the host with a timeout, for a barrier, and under
  // SYMM_BLOCKING_WAIT.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  // The future is complete from the start: its callbacks run on streams that wait for the result.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;
  std::chrono::milliseconds getTimeout() const SYMM_OVERRIDE_TIMEOUTS;

 private:
  enum class Phase { Batching, Launched, Refused, Done };
  // Progress on the device, as known without waiting. Recorded: the calls run when a graph is
  // replayed. Unknown: a query would end a capture.
  enum class Progress { Running, Done, Recorded, Unknown };

  // mutex_ must be held for these.
  bool gather(
      const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout,
      bool background);
  void launch_batch();
  // Returns the stream for background calls.
  SideStream own_stream() const;
  void enqueue() const;
  c10::Event& end() const;
  Progress progress() const;
  std::exception_ptr failure() const;
  void keep_tensors() const;
  void release_inputs();

  void block_host(std::chrono::milliseconds timeout);
  void rethrow() const;

  const Group group_;
  const std::shared_ptr<DeviceStreams> streams_;
  const uint64_t sequence_;
  // Everything below is guarded by mutex_ of the base.
  c10::SmallVector<std::shared_ptr<Operation>, 1> operations_;
  std::vector<MessageSpec> transfers_;
  bool background_ = false;
  // The longest timeout of a call; if not positive, it stands for the group's timeout.
  std::optional<std::chrono::milliseconds> timeout_;
  mutable Phase phase_ = Phase::Batching;
  mutable std::exception_ptr failure_;
  // The streams that were current when the calls were added; the calls wait for their present work.
  c10::SmallVector<c10::Stream, 1> makers_;
  // The launching thread's stream, and the stream of the calls: the same one, or one of the group's
  // own.
  std::optional<c10::Stream> origin_;
  std::optional<c10::Stream> stream_;
  // Marks the end of the calls on stream_; made only on demand for calls on the caller's stream.
  mutable std::optional<c10::Event> end_;
  // True if the end was recorded into a graph, so that it cannot be queried.
  bool recorded_ = false;
  // True once a stream waits for the end, so that later users of the tensors' memory are ordered
  // after it.
  bool ordered_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace symm
