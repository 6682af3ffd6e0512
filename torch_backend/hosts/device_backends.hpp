// Backends of somebody else's, NCCL, between GPUs of different hosts, and memory for what is on its way.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "hosts/engines.hpp"

namespace symm {

// Everything is enqueued behind what the calling thread's current stream holds, in whose order memory is given back.
class DeviceBackends final : public DeviceBackendsHandle {
 public:
  DeviceBackends(std::string group, c10::intrusive_ptr<::c10d::Store> store) : maker_(std::move(group), std::move(store)) {}

  Status make(
      uint32_t which,
      rust::Str engine,
      rust::Str name,
      std::array<size_t, 2> ranks,
      int32_t device,
      int64_t timeout_ms) const noexcept override;
  Status memory(int32_t device, size_t bytes, size_t& address) const noexcept override;
  Status follow(bool all) const noexcept override;
  Status all_gather(int32_t device, size_t from, size_t each, size_t to, bool beside) const noexcept override;
  Status all_to_all(
      int32_t device,
      std::array<size_t, 2> at,
      rust::Slice<const size_t> sent,
      rust::Slice<const size_t> received,
      bool beside) const noexcept override;
  Status broadcast(int32_t device, size_t root, size_t at, size_t bytes, bool beside) const noexcept override;
  Status exchange(uint32_t which, int32_t device, rust::Slice<const Span> give, rust::Slice<const Span> take)
      const noexcept override;
  void abort(uint32_t which) const noexcept override;
  void close() const noexcept override;

 private:
  using Pending = c10::intrusive_ptr<::c10d::Work>;

  struct Made {
    Engine backend;
    size_t size = 0;
  };

  // The backend `which`; throws where it is not there.
  Made made(uint32_t which) const;
  // Has the current stream wait for what was enqueued, now or, where it goes beside it, in `follow`.
  void enqueued(Pending work, bool beside) const;

  const Maker maker_;
  mutable std::mutex mutex_;
  // Guarded by mutex_, by what Rust calls them.
  mutable std::map<uint32_t, Made> made_;
  const GivenUp aborted_ = std::make_shared<std::atomic<bool>>(false);
  // Used by one caller at a time: what `follow` lets go of.
  mutable std::vector<at::Tensor> memory_;
  mutable std::deque<Pending> beside_;
};

} // namespace symm
