// Streams and events of one device, through torch's device interface, without linking against CUDA.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

namespace symm {

// The group's own streams on a device: sends, receives and other calls do not wait for each other.
enum class SideStream { Calls, Sends, Receives };

// A group's streams on one device, and the events that order them with others. Usable from any
// thread.
class DeviceStreams {
 public:
  explicit DeviceStreams(at::Device device);
  ~DeviceStreams();
  DeviceStreams(const DeviceStreams&) = delete;
  DeviceStreams& operator=(const DeviceStreams&) = delete;

  at::Device device() const {
    return device_;
  }
  // Returns the calling thread's stream on the device.
  c10::Stream current() const {
    return interface_->getStream(device_);
  }
  // Returns the group's own stream, of high priority, after making it wait for the present work on
  // `stream`.
  c10::Stream own_after(SideStream which, const c10::Stream& stream);
  // Makes `stream` wait for the present work on `other`, unless only one of them records a graph.
  void order(const c10::Stream& other, const c10::Stream& stream);
  // As `order`, for the present work on the group's own stream.
  void wait_for_own(SideStream which, const c10::Stream& stream);
  // Returns the `CUstream`.
  size_t handle(const c10::Stream& stream) const;
  // Returns true if the stream records a graph; its events must not be queried then.
  bool records_graph(const c10::Stream& stream) const;
  // Keeps the allocator from reusing the tensor's memory before `stream` has finished its present
  // work.
  void keep(const at::Tensor& tensor, const c10::Stream& stream) const;

  // Returns an unused event, from the returned ones if possible, because making one takes as long
  // as recording it twice.
  c10::Event take_event();
  void put_back(c10::Event event);

 private:
  const at::Device device_;
  const c10::impl::DeviceGuardImplInterface* const interface_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::array<std::optional<c10::Stream>, 3> own_;
  std::optional<c10::Event> ready_;
  std::vector<c10::Event> spare_;
};

// Returns the CUDA device with this index, if this machine has CUDA devices.
std::optional<at::Device> cuda_device(int64_t index);

} // namespace symm
