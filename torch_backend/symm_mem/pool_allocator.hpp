// Tensors in memory that peers load and store directly.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <optional>

namespace symm {

// Returns the process's allocator for torch.cuda.MemPool, which lives as long as the process.
// Throws NotImplementedError if no device can have such memory.
std::shared_ptr<c10::Allocator> symmetric_allocator();

// Returns `device` with its index, by default the index of the current CUDA device; nothing if the
// device cannot have such memory.
std::optional<at::Device> sharing_device(at::Device device);

// A group's hold on the pools of its process, one per device: a pool ends with its last holder.
// Usable from any thread, with and without the GIL.
class PoolRef {
 public:
  PoolRef() = default;
  ~PoolRef();
  PoolRef(const PoolRef&) = delete;
  PoolRef& operator=(const PoolRef&) = delete;

  at::Tensor allocate(int64_t count, const at::TensorOptions& options);
  // Ends the hold. Tensors of the pools stay valid; once they are freed, torch.cuda.empty_cache()
  // returns their memory.
  void let_go();

 private:
  std::atomic<bool> holds_ = false;
};

} // namespace symm
