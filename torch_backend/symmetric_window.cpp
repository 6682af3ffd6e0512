#include "symmetric_window.hpp"

#include <algorithm>
#include <limits>

#include "compat.hpp"
#include "errors.hpp"
#include "gil.hpp"

namespace symm {

namespace {

std::vector<void*> pointers(const rust::Vec<size_t>& addresses) {
  std::vector<void*> found;
  found.reserve(addresses.size());
  for (const auto address : addresses) {
    found.push_back(reinterpret_cast<void*>(address));
  }
  return found;
}

// What is longer than the core's longest limit means that one.
int64_t limit(size_t timeout_ms) {
  return static_cast<int64_t>(std::min<size_t>(timeout_ms, std::numeric_limits<int64_t>::max()));
}

} // namespace

SymmetricWindow::SymmetricWindow(
    rust::Box<WindowHandle> window,
    const Membership& member,
    at::Device device,
    size_t bytes)
    : window_(std::move(window)),
      group_(member.group),
      rank_(member.rank),
      world_size_(member.size),
      device_(device),
      bytes_(bytes),
      buffers_(pointers(window_->buffers())),
      pads_(pointers(window_->pads())) {
  for (const auto rank : window_->global_ranks()) {
    global_ranks_.push_back(rank);
  }
}

void** SymmetricWindow::get_buffer_ptrs_dev() {
  return reinterpret_cast<void**>(window_->buffer_table());
}

void** SymmetricWindow::get_signal_pad_ptrs_dev() {
  return reinterpret_cast<void**>(window_->pad_table());
}

int* SymmetricWindow::get_rank_to_global_rank_dev() {
  return reinterpret_cast<int*>(window_->rank_table());
}

size_t SymmetricWindow::stream() const {
  if (device_.is_cpu()) {
    return 0;
  }
  const auto& interface = *c10::impl::getDeviceGuardImpl(device_.type());
  return native_stream(interface, interface.getStream(device_));
}

void SymmetricWindow::barrier(int channel, size_t timeout_ms) {
  check(without_gil([&] { return window_->barrier(channel, limit(timeout_ms), stream()); }));
}

void SymmetricWindow::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  check(without_gil([&] { return window_->put_signal(dst_rank, channel, limit(timeout_ms), stream()); }));
}

void SymmetricWindow::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  check(without_gil([&] { return window_->wait_signal(src_rank, channel, limit(timeout_ms), stream()); }));
}

void SymmetricWindow::reduce(c10::ScalarType dtype, uint8_t reduce_op, size_t offset, size_t bytes, void* out) {
  check(window_->reduce(static_cast<int32_t>(dtype), reduce_op, offset, bytes, reinterpret_cast<size_t>(out)));
}

std::byte* SymmetricWindow::at(int rank, size_t offset) const {
  return static_cast<std::byte*>(buffers_.at(static_cast<size_t>(rank))) + offset;
}

bool SymmetricWindow::serves(const Group& group) const {
  // An expired owner is no group's, whatever has its address now.
  return !group_.owner_before(group) && !group.owner_before(group_) && window_->is_current();
}

} // namespace symm
