// Tensors in memory that peers load and store directly.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>
#include <optional>

namespace symm {

// The process's allocator for torch.cuda.MemPool, which lives as long as the process. Throws NotImplementedError where no device can
// have such memory.
std::shared_ptr<c10::Allocator> symmetric_allocator();

// The CUDA device with an index that `device` means, the current one if it names none; nothing if it cannot have such memory.
std::optional<at::Device> sharing_device(at::Device device);

// Hold of a group on the pools that its process has, one per device: a pool ends with its last holder. May be used from any thread, with
// and without the GIL.
class PoolHold {
 public:
  PoolHold() = default;
  ~PoolHold();
  PoolHold(const PoolHold&) = delete;
  PoolHold& operator=(const PoolHold&) = delete;

  at::Tensor allocate(int64_t count, const at::TensorOptions& options);
  // Tensors stay valid; what they leave goes back with torch.cuda.empty_cache().
  void let_go();

 private:
  std::atomic<bool> holds_ = false;
};

} // namespace symm
