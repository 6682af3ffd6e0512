#include "work/device_streams.hpp"

#include <c10/core/DeviceGuard.h>

#include "compat.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

namespace {

// More calls than this are rarely in flight at once.
constexpr size_t kSpareEvents = 64;

} // namespace

DeviceStreams::DeviceStreams(at::Device device)
    : device_(device),
      interface_(c10::impl::getDeviceGuardImpl(device.type())),
      ready_(device.type()) {}

DeviceStreams::~DeviceStreams() {
  try {
    // Destroying an event switches devices and then back to the thread's device; without the guard,
    // that would create a context on a device that has none.
    const c10::DeviceGuard guard(device_);
    ready_.reset();
    spare_.clear();
  } catch (...) {
    // The driver is shut down already, and the events with it.
  }
}

c10::Stream DeviceStreams::own_after(SideStream which, const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& own = own_.at(static_cast<size_t>(which));
  if (!own) {
    own = interface_->getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
  }
  if (*own != stream) {
    // The wait refers to this recording of the event, so the next caller may record the event
    // again.
    ready_->record(stream);
    ready_->block(*own);
  }
  return *own;
}

void DeviceStreams::order(const c10::Stream& other, const c10::Stream& stream) {
  const c10::DeviceGuard guard(device_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (other != stream && capture_of(handle(other)) == capture_of(handle(stream))) {
    ready_->record(other);
    ready_->block(stream);
  }
}

void DeviceStreams::wait_for_own(SideStream which, const c10::Stream& stream) {
  std::optional<c10::Stream> own;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    own = own_.at(static_cast<size_t>(which));
  }
  if (own) {
    order(*own, stream);
  }
}

size_t DeviceStreams::handle(const c10::Stream& stream) const {
  return native_stream(*interface_, stream);
}

bool DeviceStreams::records_graph(const c10::Stream& stream) const {
  const c10::DeviceGuard guard(device_);
  return capture_of(handle(stream)) != 0;
}

void DeviceStreams::keep(const at::Tensor& tensor, const c10::Stream& stream) const {
  if (tensor.defined() && tensor.has_storage()) {
    interface_->recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

c10::Event DeviceStreams::take_event() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (spare_.empty()) {
    return c10::Event(device_.type());
  }
  auto event = std::move(spare_.back());
  spare_.pop_back();
  return event;
}

void DeviceStreams::put_back(c10::Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (spare_.size() < kSpareEvents) {
    spare_.push_back(std::move(event));
  }
}

std::optional<at::Device> cuda_device(int64_t index) {
  if (!c10::impl::hasDeviceGuardImpl(at::kCUDA) ||
      c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount() == 0) {
    return std::nullopt;
  }
  const auto count = c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount();
  TORCH_CHECK_VALUE(
      index >= 0 && index < count, "there is no CUDA device ", index, ": this process sees ",
      int(count));
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

} // namespace symm
