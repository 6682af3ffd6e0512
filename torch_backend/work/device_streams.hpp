// Streams and events of one device, through torch's own device interface: nothing here links against CUDA.
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

// Stream of a group's own on a device: sends do not wait for receives, nor other calls for either.
enum class Own { Calls, Sends, Receives };

// A group's streams on one device, and what is needed to order them with others. May be used from any thread.
class DeviceStreams {
 public:
  explicit DeviceStreams(at::Device device);
  ~DeviceStreams();
  DeviceStreams(const DeviceStreams&) = delete;
  DeviceStreams& operator=(const DeviceStreams&) = delete;

  at::Device device() const {
    return device_;
  }
  // The calling thread's stream on the device.
  c10::Stream current() const {
    return interface_->getStream(device_);
  }
  // Stream of the group's own, of high priority, which goes on once `stream` has done what it holds now.
  c10::Stream own_after(Own which, const c10::Stream& stream);
  // The `CUstream`.
  size_t handle(const c10::Stream& stream) const;
  // Whether the stream records a graph: its events must not be asked then.
  bool records_graph(const c10::Stream& stream) const;
  // Keeps the allocator from giving the tensor's memory away before `stream` has done what it holds now.
  void keep(const at::Tensor& tensor, const c10::Stream& stream) const;

  // An event that nobody else uses, from those put back if there is one: making one takes as long as recording it twice.
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

// The CUDA device with this index, if this machine has CUDA devices; else none.
std::optional<at::Device> cuda_device(int64_t index);

} // namespace symm
