// The streams of a fused operator: the caller's stream, and a second one that copies from peers.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "symm/src/bridge/fused.rs.h"

namespace symm {

// The streams of a group's fused matmuls, which run one call at a time. The CPU has no streams:
// everything is done in order when the call returns.
class CallStreams {
 public:
  explicit CallStreams(at::Device device);
  ~CallStreams();
  CallStreams(const CallStreams&) = delete;
  CallStreams& operator=(const CallStreams&) = delete;

  // Starts a call on the calling thread's stream. A captured call is ordered after the previous
  // call of the same capture, any other call after the previous call outside captures, whatever
  // their streams. The program must order the replays of graphs.
  void begin();
  // Ends the call: the caller's stream waits for both streams.
  void end();
  // Returns once the device has finished all calls.
  void settle() const;
  at::Device device() const {
    return device_;
  }
  // Returns the number of the capture that records the call, or 0 outside a capture.
  uint64_t capture() const {
    return capture_;
  }
  // Returns the caller's `CUstream`; 0 on the CPU.
  size_t handle() const;

  // Marks the present end of `stream`; the marks of a call are numbered from 0.
  void mark(FusedStream stream, size_t number);
  // Makes later work on `stream` wait for the mark.
  void after(FusedStream stream, size_t number);

  // Runs `body` so that it enqueues on `stream`.
  template <typename Body>
  void on(FusedStream stream, const Body& body) {
    if (stream == FusedStream::Caller || !interface_) {
      body();
      return;
    }
    const c10::StreamGuard guard(of(stream));
    body();
  }

 private:
  const c10::Stream& of(FusedStream stream) const {
    return *streams_[static_cast<size_t>(stream)];
  }

  const at::Device device_;
  // Null on the CPU.
  const c10::impl::DeviceGuardImplInterface* const interface_;
  std::array<std::optional<c10::Stream>, 2> streams_;
  // The events of a call's marks. A wait refers to the latest recording of an event when the wait
  // is enqueued, so the next call may record the events again.
  std::vector<c10::Event> events_;
  uint64_t capture_ = 0;
  // The end of a call's work on the copying stream.
  std::optional<c10::Event> copied_;
  // The end of the last call that was not recorded into a graph.
  std::optional<c10::Event> last_;
  // The end of the last call that was recorded, and its capture.
  std::optional<c10::Event> recorded_;
  uint64_t recorded_in_ = 0;
};

} // namespace symm
