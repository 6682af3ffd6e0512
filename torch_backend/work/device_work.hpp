// The handle of calls on a CUDA device: where they stand in stream order.
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

// Work of one call, or of those of a coalesced block. Gathers first; once launched, the calls stand on one stream.
//
// Calls beside the caller's stream (async_op=True) read and write tensors that the allocator knows nothing of: the work owns them until
// some stream has been made to wait, and tells the allocator if it is dropped before.
class DeviceWork final : public ::c10d::Work {
 public:
  // `operation` says how a profiler sees the work; it must be added like any other.
  DeviceWork(int rank, Group group, std::shared_ptr<DeviceStreams> streams, const Operation& operation, uint64_t sequence);
  // Makes the work of a coalesced block.
  DeviceWork(int rank, Group group, std::shared_ptr<DeviceStreams> streams, uint64_t sequence);
  ~DeviceWork() override;

  // Adds a collective; false if the work was launched before. `timeout` not positive: the group's.
  bool add(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout, bool background);
  // Adds a send or receive. Always beside the caller's stream, as c10d does not say who is going to wait.
  bool add(const std::shared_ptr<Operation>& operation, const Transfer& transfer);
  // Enqueues what was added, behind what the calling thread's stream holds now; without effect after the first time. Throws if the core
  // refuses, and then keeps the refusal.
  void launch();
  // Whether there is a send or receive among them.
  bool has_transfers() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return !transfers_.empty();
  }
  at::Device device() const {
    return streams_->device();
  }

  // Whether the device has done it, without waiting. True for calls that a graph records: they run when it is replayed.
  bool isCompleted() override;
  bool isSuccess() const override;
  // The group's failure, if it came before the work was seen complete.
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  // Makes the calling thread's stream wait; the host goes on.
  void synchronize() override;
  void blockCurrentStream() override {
    synchronize();
  }
  // Makes the current stream wait, and blocks the host if a timeout is given, for a barrier, and under SYMM_BLOCKING_WAIT.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  // Complete from the start, as its callbacks run on streams that wait for the result.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;
  std::chrono::milliseconds getTimeout() const SYMM_OVERRIDE_TIMEOUTS;

 private:
  enum class Phase { Gathering, Launched, Refused, Done };
  // Progress on the device as it is known without waiting. Recorded: it runs when a graph is replayed. Unknown: asking would end a capture.
  enum class Progress { Running, Done, Recorded, Unknown };

  // mutex_ must be held for these.
  bool gather(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout, bool background);
  void launch_gathered();
  // Stream for calls beside the caller's stream.
  Own own_stream() const;
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
  // All below is guarded by mutex_ of the base.
  c10::SmallVector<std::shared_ptr<Operation>, 1> operations_;
  std::vector<Transfer> transfers_;
  bool background_ = false;
  // Timeout of the call that may take longest; not positive: the group's.
  std::optional<std::chrono::milliseconds> timeout_;
  mutable Phase phase_ = Phase::Gathering;
  mutable std::exception_ptr failure_;
  // Streams of the thread that launched, and of the calls: the same, or one of the group's own.
  std::optional<c10::Stream> origin_;
  std::optional<c10::Stream> stream_;
  // Marks the end of the calls on stream_; of calls on the caller's stream only once somebody asks.
  mutable std::optional<c10::Event> end_;
  // The end was marked in a graph, so that it cannot be asked.
  bool recorded_ = false;
  // Flag that is set once some stream waits for the end, and whoever uses the tensors' memory next is behind it.
  bool ordered_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace symm
