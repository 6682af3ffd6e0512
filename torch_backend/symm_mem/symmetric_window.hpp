// c10d's view of a window of the core: the ranks' buffers as mapped in this process, and their
// signal pads.
#pragma once

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <optional>
#include <vector>

#include "symm_mem/group_lookup.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

// Keeps the memory of all ranks alive, including this rank's, even after it is freed. Signals fail
// once the group has ended, and all calls fail in a forked child. Usable from any thread, one at a
// time per channel.
class SymmetricWindow final : public ::c10d::symmetric_memory::SymmetricMemory {
 public:
  // `bytes` is the size of each rank's buffer, `pad_bytes` of each rank's signal pad.
  SymmetricWindow(
      rust::Box<WindowHandle> window, const MemoryGroup& member, at::Device device, size_t bytes,
      size_t pad_bytes);

  ~SymmetricWindow() override;

  std::vector<void*> get_buffer_ptrs() override;
  std::vector<void*> get_signal_pad_ptrs() override;
  // The arrays live as long as this object, also for a window on host memory.
  void** get_buffer_ptrs_dev() override;
  void** get_signal_pad_ptrs_dev() override;
  size_t get_buffer_size() override {
    return bytes_;
  }
  // Always returns 0: a buffer starts at the memory that was passed to rendezvous().
  size_t get_offset() override {
    return 0;
  }

  // Return tensors like torch's functions of these names, which they hide: the tensors keep the
  // window alive, and requests beyond the memory of `rank` are rejected.
  at::Tensor get_buffer(
      int rank, c10::IntArrayRef sizes, c10::ScalarType dtype, int64_t storage_offset = 0);
  at::Tensor get_remote_tensor(int rank, c10::IntArrayRef sizes, c10::ScalarType dtype);
  at::Tensor get_signal_pad(
      int rank,
      c10::IntArrayRef sizes = {},
      std::optional<c10::ScalarType> dtype = std::nullopt,
      int64_t storage_offset = 0);

  bool has_multicast_support() override {
    return false;
  }
  void* get_multicast_ptr() override {
    return nullptr;
  }

  // On CUDA, these enqueue on the caller's current stream and return; a later call throws the
  // failure. A `timeout_ms` of 0 means the group's timeout.
  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

  int get_rank() override {
    return rank_;
  }
  int get_world_size() override {
    return world_size_;
  }
  c10::Device get_device() override {
    return device_;
  }
  const std::vector<int>& get_rank_to_global_rank() override {
    return global_ranks_;
  }
  int* get_rank_to_global_rank_dev() override;
  bool world_within_direct_access() override {
    return true;
  }

  // The core's window, for its collectives.
  const WindowHandle& handle() const {
    return *window_;
  }
  // Returns true if this is still the window of its memory, in this group of this process.
  bool serves(const Group& group) const;

 private:
  // Returns the calling thread's stream on the device; 0 on the host.
  size_t stream() const;
  // Records a use before an address is returned: throws in a forked child, and keeps memory that a
  // captured graph may use.
  void note_use() const;
  // Returns a tensor within the `room` bytes that start at the entry of `begins` for `rank`.
  at::Tensor view(
      const char* op,
      const std::vector<void*>& begins,
      size_t room,
      int rank,
      c10::IntArrayRef sizes,
      c10::ScalarType dtype,
      int64_t offset);

  rust::Box<WindowHandle> window_;
  const std::weak_ptr<rust::Box<GroupHandle>> group_;
  const int rank_;
  const int world_size_;
  const at::Device device_;
  const size_t bytes_;
  const size_t pad_bytes_;
  std::vector<void*> buffers_;
  std::vector<void*> pads_;
  std::vector<int> global_ranks_;
};

} // namespace symm
