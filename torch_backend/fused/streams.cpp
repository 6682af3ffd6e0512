#include "fused/streams.hpp"

#include <c10/core/DeviceGuard.h>

#include "compat.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

CallStreams::CallStreams(at::Device device)
    : device_(device),
      interface_(device.is_cpu() ? nullptr : c10::impl::getDeviceGuardImpl(device.type())) {
  if (interface_) {
    // High priority, so that short work does not wait behind a product that fills the device.
    streams_[static_cast<size_t>(FusedStream::Copying)] =
        interface_->getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
    copied_.emplace(device_.type());
    last_.emplace(device_.type());
    recorded_.emplace(device_.type());
  }
}

CallStreams::~CallStreams() {
  if (!interface_) {
    return;
  }
  try {
    // Destroying an event switches devices and then back to the thread's device; without the guard,
    // that would create a context on a device that has none.
    const c10::DeviceGuard guard(device_);
    events_.clear();
    copied_.reset();
    last_.reset();
    recorded_.reset();
  } catch (...) {
    // The driver is shut down already, and the events with it.
  }
}

void CallStreams::begin() {
  if (!interface_) {
    return;
  }
  streams_[static_cast<size_t>(FusedStream::Caller)] = interface_->getStream(device_);
  capture_ = capture_of(handle());
  // A capture cannot wait for work that it does not record.
  if (capture_ == 0) {
    last_->block(of(FusedStream::Caller));
  } else if (capture_ == recorded_in_) {
    recorded_->block(of(FusedStream::Caller));
  }
}

void CallStreams::end() {
  if (!interface_) {
    return;
  }
  copied_->record(of(FusedStream::Copying));
  copied_->block(of(FusedStream::Caller));
  if (capture_ == 0) {
    last_->record(of(FusedStream::Caller));
  } else {
    recorded_->record(of(FusedStream::Caller));
    recorded_in_ = capture_;
  }
}

void CallStreams::settle() const {
  if (interface_) {
    interface_->synchronizeDevice(device_.index());
  }
}

size_t CallStreams::handle() const {
  return interface_ ? native_stream(*interface_, of(FusedStream::Caller)) : 0;
}

void CallStreams::mark(FusedStream stream, size_t number) {
  if (!interface_) {
    return;
  }
  while (number >= events_.size()) {
    events_.emplace_back(device_.type());
  }
  events_[number].record(of(stream));
}

void CallStreams::after(FusedStream stream, size_t number) {
  if (interface_) {
    events_.at(number).block(of(stream));
  }
}

} // namespace symm
