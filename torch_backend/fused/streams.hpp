// The streams of a fused operator: the caller's, and one beside it that copies from peers.
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

// Streams of a group's fused products, which serve one call at a time. On the CPU there are none: all is done when it returns, in the order
// in which it is asked for.
class CallStreams {
 public:
  explicit CallStreams(at::Device device);
  ~CallStreams();
  CallStreams(const CallStreams&) = delete;
  CallStreams& operator=(const CallStreams&) = delete;

  // Begins a call on the calling thread's stream, behind the call before, whichever stream that was on: the one that was not recorded into
  // a graph, or that of the same capture. Replays of graphs are ordered by those who start them.
  void begin();
  // Ends it: both streams have met in the caller's.
  void end();
  // Returns once the device has done everything.
  void settle() const;
  at::Device device() const {
    return device_;
  }
  // The number of the capture that records the call; 0: none does.
  uint64_t capture() const {
    return capture_;
  }
  // The caller's `CUstream`; 0 on the CPU.
  size_t handle() const;

  // Marks what `stream` holds by now; the marks of a call are numbered from 0.
  void mark(FusedStream stream, size_t number);
  // Makes what is put into `stream` from now on begin after the mark.
  void after(FusedStream stream, size_t number);

  // Puts what `body` enqueues into `stream`.
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
  // Events of the call; a stream waits for what an event marks at that moment, so that the next call may record them anew.
  std::vector<c10::Event> events_;
  uint64_t capture_ = 0;
  // All that a call's copying stream holds.
  std::optional<c10::Event> copied_;
  // The end of the last call that was not recorded into a graph.
  std::optional<c10::Event> last_;
  // The end of the last call that was, and in which capture.
  std::optional<c10::Event> recorded_;
  uint64_t recorded_in_ = 0;
};

} // namespace symm
