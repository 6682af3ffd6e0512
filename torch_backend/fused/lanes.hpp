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

namespace symm {

enum class Lane : uint8_t { Main, Pull };

// Lanes of a group's fused products, which serve one call at a time. On the CPU there is but one lane: all is done when it returns, in the
// order in which it is written.
class Lanes {
 public:
  explicit Lanes(at::Device device);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Begins a call on the calling thread's stream, behind the call before, whichever stream that was on: the one that was not recorded into
  // a graph, or that of the same capture. Replays of graphs are ordered by those who start them.
  void begin();
  // Ends it: all lanes have met in the caller's stream.
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

  // Mark of what `lane` holds by now.
  using Mark = size_t;
  Mark mark(Lane lane);
  // Makes what is put into `lane` from now on begin after the mark.
  void after(Lane lane, Mark mark);

  // Puts what `body` enqueues into `lane`.
  template <typename Body>
  void on(Lane lane, const Body& body) {
    if (lane == Lane::Main || !interface_) {
      body();
      return;
    }
    const c10::StreamGuard guard(stream(lane));
    body();
  }

 private:
  const c10::Stream& stream(Lane lane) const {
    return *streams_[static_cast<size_t>(lane)];
  }

  const at::Device device_;
  // Null on the CPU.
  const c10::impl::DeviceGuardImplInterface* const interface_;
  std::array<std::optional<c10::Stream>, 2> streams_;
  // Events of the call; a stream waits for what an event marks at that moment, so that the next call may record them anew.
  std::vector<c10::Event> events_;
  size_t marks_ = 0;
  uint64_t capture_ = 0;
  // The end of the last call that was not recorded into a graph.
  std::optional<c10::Event> last_;
  // The end of the last call that was, and in which capture.
  std::optional<c10::Event> recorded_;
  uint64_t recorded_in_ = 0;
};

} // namespace symm
