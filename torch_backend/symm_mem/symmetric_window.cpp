#include "symm_mem/symmetric_window.hpp"

#include <c10/util/safe_numerics.h>

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

// Returns the end, in bytes, of a tensor of shape `sizes` that starts at element `offset` and whose
// elements have `element` bytes; nothing on overflow.
std::optional<size_t> end_of(c10::IntArrayRef sizes, uint64_t element, int64_t offset) {
  uint64_t count = 0;
  uint64_t end = 0;
  if (c10::safe_multiplies_u64(sizes, &count) ||
      c10::add_overflows(count, static_cast<uint64_t>(offset), &end) ||
      c10::mul_overflows(end, element, &end)) {
    return std::nullopt;
  }
  return end;
}

// Converts a timeout, limited to the core's maximum.
int64_t limit(size_t timeout_ms) {
  return static_cast<int64_t>(std::min<size_t>(timeout_ms, std::numeric_limits<int64_t>::max()));
}

} // namespace

SymmetricWindow::SymmetricWindow(
    rust::Box<WindowHandle> window,
    const MemoryGroup& member,
    at::Device device,
    size_t bytes,
    size_t pad_bytes)
    : window_(std::move(window)),
      group_(member.group),
      rank_(member.rank),
      world_size_(member.size),
      device_(device),
      bytes_(bytes),
      pad_bytes_(pad_bytes),
      buffers_(pointers(window_->buffers())),
      pads_(pointers(window_->pads())) {
  for (const auto rank : window_->global_ranks()) {
    global_ranks_.push_back(rank);
  }
}

SymmetricWindow::~SymmetricWindow() {
  if (!window_->is_current()) {
    // This may be the last reference to freed memory, whose release waits for the device and the
    // peers. Other releases do not wait and keep the GIL: the caller may hold the lock of torch's
    // allocator, and a thread that took the GIL could wait for that lock.
    without_gil([this] { const auto last = std::move(window_); });
  }
}

void SymmetricWindow::note_use() const {
  check(window_->check_process());
  if (device_.is_cuda() && capture_of(stream()) != 0) {
    window_->record();
  }
}

std::vector<void*> SymmetricWindow::get_buffer_ptrs() {
  note_use();
  return buffers_;
}

std::vector<void*> SymmetricWindow::get_signal_pad_ptrs() {
  note_use();
  return pads_;
}

at::Tensor SymmetricWindow::view(
    const char* op,
    const std::vector<void*>& begins,
    size_t room,
    int rank,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype,
    int64_t offset) {
  note_use();
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < world_size_, op, ": rank ", rank, " is outside the group of ",
      world_size_, " ranks");
  TORCH_CHECK_VALUE(
      offset >= 0, op, ": a tensor cannot begin ", offset,
      " elements behind the begin of the memory");
  TORCH_CHECK_VALUE(
      std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }), op,
      ": a tensor cannot have the sizes ", sizes);
  const auto element = c10::elementSize(dtype);
  const auto end = end_of(sizes, element, offset);
  TORCH_CHECK(
      end && *end <= room, "SymmetricMemory::", op, ": the requested size (",
      end ? std::to_string(*end) : "more than 2^64", " bytes) exceeds the allocated size (", room,
      " bytes)");
  auto* const at = static_cast<std::byte*>(begins[static_cast<size_t>(rank)]) +
                   static_cast<size_t>(offset) * element;
  auto self = c10::intrusive_ptr<SymmetricWindow>::reclaim_copy(this);
  return at::for_blob(at, sizes)
      .options(at::TensorOptions().dtype(dtype).device(device_))
      .target_device(device_)
      .deleter([self = std::move(self)](void*) {})
      .make_tensor();
}

at::Tensor SymmetricWindow::get_buffer(
    int rank, c10::IntArrayRef sizes, c10::ScalarType dtype, int64_t storage_offset) {
  return view("get_buffer", buffers_, bytes_, rank, sizes, dtype, storage_offset);
}

at::Tensor SymmetricWindow::get_remote_tensor(
    int rank, c10::IntArrayRef sizes, c10::ScalarType dtype) {
  return view("get_remote_tensor", buffers_, bytes_, rank, sizes, dtype, 0);
}

at::Tensor SymmetricWindow::get_signal_pad(
    int rank,
    c10::IntArrayRef sizes,
    std::optional<c10::ScalarType> dtype,
    int64_t storage_offset) {
  const auto type = dtype.value_or(at::kUInt32);
  // The size of this window's pads, because torch's size may differ for later windows.
  const auto all = static_cast<int64_t>(pad_bytes_ / c10::elementSize(type));
  return view(
      "get_signal_pad", pads_, pad_bytes_, rank, sizes.empty() ? c10::IntArrayRef(all) : sizes,
      type, storage_offset);
}

void** SymmetricWindow::get_buffer_ptrs_dev() {
  note_use();
  return reinterpret_cast<void**>(window_->tables()[0]);
}

void** SymmetricWindow::get_signal_pad_ptrs_dev() {
  note_use();
  return reinterpret_cast<void**>(window_->tables()[1]);
}

int* SymmetricWindow::get_rank_to_global_rank_dev() {
  note_use();
  return reinterpret_cast<int*>(window_->tables()[2]);
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
  check(without_gil(
      [&] { return window_->put_signal(dst_rank, channel, limit(timeout_ms), stream()); }));
}

void SymmetricWindow::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  check(without_gil(
      [&] { return window_->wait_signal(src_rank, channel, limit(timeout_ms), stream()); }));
}

bool SymmetricWindow::serves(const Group& group) const {
  // An expired owner does not match any group, even if another group has its address now.
  return !group_.owner_before(group) && !group.owner_before(group_) && window_->is_current();
}

} // namespace symm
