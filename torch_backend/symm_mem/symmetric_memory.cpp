#include "symm_mem/symmetric_memory.hpp"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Logging.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "errors.hpp"
#include "gil.hpp"
#include "symm_mem/operators.hpp"

namespace symm {

namespace {

// torch's name of the group that has all ranks, unless a program chose another.
constexpr auto kDefaultGroup = "0";

using Allocator = c10::intrusive_ptr<SymmetricAllocator>;

// Never destroyed. torch destroys its map of allocators at the very end, when the driver and other
// threads' windows may no longer exist.
const Allocator& cuda_allocator() {
  static const auto* const allocator =
      new Allocator(c10::make_intrusive<SymmetricAllocator>(c10::kCUDA));
  return *allocator;
}

at::Device device_of(c10::DeviceType type, int index) {
  if (type == c10::kCPU) {
    return at::Device(c10::kCPU);
  }
  if (index < 0) {
    return c10::impl::getDeviceGuardImpl(type)->getDevice();
  }
  return at::Device(type, static_cast<c10::DeviceIndex>(index));
}

// Returns the core's number of a device; the host is -1.
int32_t number(at::Device device) {
  return device.is_cpu() ? -1 : device.index();
}

} // namespace

void* SymmetricAllocator::alloc(
    size_t size, int device_idx, const std::optional<std::string>& group_name) {
  const auto device = device_of(type_, device_idx);
  // A tensor without elements has an address, too, so that ranks can meet at it.
  size_t address = 0;
  check(allocate_window(number(device), std::max<size_t>(size, 1), address));
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.insert_or_assign(address, Block{size, device, group_name, getpid()});
  return reinterpret_cast<void*>(address);
}

void SymmetricAllocator::free(void* ptr) {
  const auto address = reinterpret_cast<size_t>(ptr);
  auto owner = getpid();
  size_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(address);
    if (block != blocks_.end()) {
      owner = block->second.owner;
      bytes = block->second.bytes;
      blocks_.erase(block);
    }
  }
  forget(address, bytes);
  if (owner != getpid()) {
    return;
  }
  const auto outcome = without_gil([&] { return free_window(address); });
  if (outcome.kind != ErrorKind::None) {
    LOG(ERROR) << "symmetric memory at " << ptr << " stays taken: " << std::string(outcome.message);
  }
}

void SymmetricAllocator::forget(size_t address, size_t bytes) {
  // Dropped without the lock.
  std::vector<c10::intrusive_ptr<SymmetricWindow>> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto from = windows_.lower_bound({address, {}});
  const auto to = windows_.lower_bound({address + std::max<size_t>(bytes, 1), {}});
  for (auto it = from; it != to; ++it) {
    ended.push_back(std::move(it->second));
  }
  windows_.erase(from, to);
}

size_t SymmetricAllocator::get_alloc_size(void* ptr) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto block = blocks_.find(reinterpret_cast<size_t>(ptr));
  TORCH_CHECK_VALUE(
      block != blocks_.end(), "get_alloc_size: no allocation of symmetric memory begins at ", ptr);
  return block->second.bytes;
}

const std::pair<const size_t, SymmetricAllocator::Block>* SymmetricAllocator::covering(
    size_t address) const {
  const auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) {
    return nullptr;
  }
  const auto& block = *std::prev(after);
  return address < block.first + std::max<size_t>(block.second.bytes, 1) ? &block : nullptr;
}

std::optional<at::Device> SymmetricAllocator::elsewhere(size_t address) const {
  if (type_ == c10::kCPU || !is_symmetric(address)) {
    return std::nullopt;
  }
  return at::globalContext().getDeviceFromPtr(reinterpret_cast<void*>(address), type_);
}

bool SymmetricAllocator::has_allocation(void* ptr) {
  const auto address = reinterpret_cast<size_t>(ptr);
  const std::lock_guard<std::mutex> lock(mutex_);
  return covering(address) != nullptr || elsewhere(address).has_value();
}

c10::intrusive_ptr<SymmetricWindow> SymmetricAllocator::known(const Key& key, const Group& group) {
  // Dropped without the lock.
  c10::intrusive_ptr<SymmetricWindow> window;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = windows_.find(key);
  if (found == windows_.end()) {
    return nullptr;
  }
  if (found->second->serves(group)) {
    return found->second;
  }
  window = std::move(found->second);
  windows_.erase(found);
  return nullptr;
}

c10::intrusive_ptr<::c10d::symmetric_memory::SymmetricMemory> SymmetricAllocator::rendezvous(
    void* ptr,
    const std::optional<std::string>& group_name) {
  const auto address = reinterpret_cast<size_t>(ptr);
  std::optional<at::Device> device;
  auto name = group_name;
  std::optional<size_t> bytes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto* const block = covering(address)) {
      device = block->second.device;
      bytes = block->first + block->second.bytes - address;
      name = name ? name : block->second.group_name;
    }
  }
  device = device ? device : elsewhere(address);
  if (!device) {
    return nullptr;
  }
  const Key key(address, name.value_or(kDefaultGroup));
  const auto member = membership(key.second, type_);
  if (auto window = known(key, member.group)) {
    return window;
  }
  const auto pad_bytes = ::c10d::symmetric_memory::get_signal_pad_size();
  auto opened = without_gil(
      [&] { return (*member.group)->rendezvous(number(*device), address, pad_bytes, 0); });
  check(opened.status);
  const auto reached = opened.window->bytes();
  auto window = c10::make_intrusive<SymmetricWindow>(
      std::move(opened.window), member, *device, bytes ? std::min(*bytes, reached) : reached,
      pad_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  windows_.insert_or_assign(key, window);
  return window;
}

void register_symmetric_memory() {
  namespace torch_memory = ::c10d::symmetric_memory;
  static const auto* const host = new Allocator(c10::make_intrusive<SymmetricAllocator>(c10::kCPU));
  if (!torch_memory::has_allocator(c10::kCPU)) {
    torch_memory::register_allocator(c10::kCPU, *host);
  }
  torch_memory::register_availability("SYMM", cuda_allocator());
  on_forget_windows(
      [](size_t address, size_t bytes) noexcept { cuda_allocator()->forget(address, bytes); });
  static auto* const library = new torch::Library(
      torch::Library::IMPL, "symm_mem", c10::DispatchKey::CPU, __FILE__,
      static_cast<uint32_t>(__LINE__));
  add_reductions(*library);
  add_exchanges(*library);
}

} // namespace symm
