#include "fused/lanes.hpp"

#include <c10/core/DeviceGuard.h>

#include "compat.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

Lanes::Lanes(at::Device device)
    : device_(device), interface_(device.is_cpu() ? nullptr : c10::impl::getDeviceGuardImpl(device.type())) {
  if (interface_) {
    // Beside a product that fills the device, what is short must not queue for its turn.
    streams_[static_cast<size_t>(Lane::Pull)] = interface_->getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
    last_.emplace(device_.type());
    recorded_.emplace(device_.type());
  }
}

Lanes::~Lanes() {
  if (!interface_) {
    return;
  }
  try {
    // Destroying an event goes back to the thread's device, which would make a context there if it had none.
    const c10::DeviceGuard guard(device_);
    events_.clear();
    last_.reset();
    recorded_.reset();
  } catch (...) {
    // The driver is gone already, and the events with it.
  }
}

void Lanes::begin() {
  if (!interface_) {
    return;
  }
  marks_ = 0;
  streams_[static_cast<size_t>(Lane::Main)] = interface_->getStream(device_);
  capture_ = capture_of(handle());
  // A capture cannot wait for what it does not record.
  if (capture_ == 0) {
    last_->block(stream(Lane::Main));
  } else if (capture_ == recorded_in_) {
    recorded_->block(stream(Lane::Main));
  }
}

void Lanes::end() {
  if (!interface_) {
    return;
  }
  after(Lane::Main, mark(Lane::Pull));
  if (capture_ == 0) {
    last_->record(stream(Lane::Main));
  } else {
    recorded_->record(stream(Lane::Main));
    recorded_in_ = capture_;
  }
}

void Lanes::settle() const {
  if (interface_) {
    interface_->synchronizeDevice(device_.index());
  }
}

size_t Lanes::handle() const {
  return interface_ ? native_stream(*interface_, stream(Lane::Main)) : 0;
}

Lanes::Mark Lanes::mark(Lane lane) {
  if (!interface_) {
    return 0;
  }
  if (marks_ == events_.size()) {
    events_.emplace_back(device_.type());
  }
  events_[marks_].record(stream(lane));
  return marks_++;
}

void Lanes::after(Lane lane, Mark mark) {
  if (interface_) {
    events_[mark].block(stream(lane));
  }
}

} // namespace symm
