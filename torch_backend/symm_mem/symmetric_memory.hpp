// Symmetric memory behind torch.distributed._symmetric_memory.
#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "compat.hpp"
#include "symm_mem/symmetric_window.hpp"

namespace symm {

// Segments of the core's heaps. Usable from any thread, with and without the GIL.
class SymmetricAllocator final : public ::c10d::symmetric_memory::SymmetricMemoryAllocator {
 public:
  // `type` is the allocator's device type, CPU or CUDA. Touches no device.
  explicit SymmetricAllocator(c10::DeviceType type) : type_(type) {}

  // Allocates zeroed memory. A `device_idx` of -1 means the current device. rendezvous() uses
  // `group_name` if its caller names no group.
  void* alloc(size_t size, int device_idx, const std::optional<std::string>& group_name) override;
  // Frees memory; it stays allocated while a handle or a view holds a window on it. A failure is
  // logged, because torch has forgotten the memory.
  void free(void* ptr) override;
  // Forgets the windows that start in these bytes, which are about to be freed: no later rendezvous
  // finds them.
  void forget(size_t address, size_t bytes);
  size_t get_alloc_size(void* ptr) override;
  // Makes the window, collectively unless the group has it already. Null if the memory is not
  // symmetric, as torch's operators expect. Without `group_name`, uses the group of the allocation,
  // or the default group.
  c10::intrusive_ptr<::c10d::symmetric_memory::SymmetricMemory> rendezvous(
      void* ptr,
      const std::optional<std::string>& group_name) override;
  // Returns true for memory that rendezvous() accepts.
  bool has_allocation(void* ptr) SYMM_OVERRIDE_HAS_ALLOCATION;
  bool has_multicast_support(int) override {
    return false;
  }
  c10::DeviceType supported_device_type() override {
    return type_;
  }
  std::string name() override {
    return "SYMM";
  }

 private:
  struct Block {
    size_t bytes;
    at::Device device;
    std::optional<std::string> group_name;
    // The process that made it: a forked child inherits the record, but not the memory.
    pid_t owner;
  };
  // The key of a window: the first address of the memory and the name of the group.
  using Key = std::pair<size_t, std::string>;
  using Windows = std::map<Key, c10::intrusive_ptr<SymmetricWindow>>;

  // Returns the block of `alloc` that contains `address`; mutex_ must be held.
  const std::pair<const size_t, Block>* covering(size_t address) const;
  // Returns the device of `address` if it is in symmetric memory of a GPU. For addresses that
  // `covering` does not find: that memory comes from torch_symm.mem_allocator, not from `alloc`.
  std::optional<at::Device> elsewhere(size_t address) const;
  // Returns the window if it still serves `group`, and otherwise forgets it.
  c10::intrusive_ptr<SymmetricWindow> known(const Key& key, const Group& group);

  const c10::DeviceType type_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<size_t, Block> blocks_;
  Windows windows_;
};

// Registers symmetric CPU memory in torch, unless torch has its own; registers the operators
// torch.ops.symm_mem for CPU tensors; makes symmetric CUDA memory available to torch's
// set_backend("SYMM").
void register_symmetric_memory();

} // namespace symm
