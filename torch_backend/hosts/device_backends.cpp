#include "hosts/device_backends.hpp"

#include <numeric>
#include <utility>

namespace symm {

namespace {

// `Which::Rail` of src/hosts/cuda/backends.rs.
constexpr uint32_t kRail = 0;

at::TensorOptions bytes_on(int32_t device) {
  return at::TensorOptions(at::kByte).device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

// The bytes at `address`, which whoever enqueues keeps.
at::Tensor bytes_at(int32_t device, size_t address, size_t bytes) {
  const auto options = bytes_on(device);
  const auto length = static_cast<int64_t>(bytes);
  if (bytes == 0) {
    return at::empty({0}, options);
  }
  return at::for_blob(reinterpret_cast<void*>(address), {length}).options(options).target_device(options.device()).make_tensor();
}

size_t sum_of(rust::Slice<const size_t> lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), size_t{0});
}

// Makes the current stream wait where the backend has used one of its own; with asyncOp=false NCCL uses the current one.
void in_stream_order(const c10::intrusive_ptr<::c10d::Work>& work) {
  if (work) {
    work->synchronize();
  }
}

c10::intrusive_ptr<::c10d::Work> gather(::c10d::Backend& backend, at::Tensor output, at::Tensor input, bool beside) {
  ::c10d::AllgatherOptions options;
  options.asyncOp = beside;
  return backend._allgather_base(output, input, options);
}

} // namespace

DeviceBackends::Made DeviceBackends::made(uint32_t which) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!*aborted_, "the connection has been aborted");
  const auto found = made_.find(which);
  TORCH_CHECK(found != made_.end(), "there is no connection");
  return found->second;
}

Status DeviceBackends::make(
    uint32_t which,
    rust::Str engine,
    rust::Str name,
    std::array<size_t, 2> ranks,
    int32_t device,
    int64_t timeout_ms) const noexcept {
  return attempted([&] {
    const auto [rank, size] = ranks;
    auto backend = maker_.make(engine, name, rank, size, timeout_ms, aborted_, device);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!*aborted_, "the connection has been aborted");
      made_[which] = {backend, size};
    }
    // Connects, which must not happen within a graph.
    const auto all = at::zeros({static_cast<int64_t>(size)}, bytes_on(device));
    in_stream_order(gather(*backend, all, at::zeros({1}, bytes_on(device)), false));
  });
}

Status DeviceBackends::memory(int32_t device, size_t bytes, size_t& address) const noexcept {
  return attempted([&] {
    memory_.push_back(at::empty({static_cast<int64_t>(bytes)}, bytes_on(device)));
    address = reinterpret_cast<size_t>(memory_.back().data_ptr());
  });
}

Status DeviceBackends::follow(bool all) const noexcept {
  const auto status = attempted([&] {
    for (auto left = all ? beside_.size() : 1; left > 0 && !beside_.empty(); --left) {
      in_stream_order(beside_.front());
      beside_.pop_front();
    }
  });
  if (all) {
    beside_.clear();
    memory_.clear();
  }
  return status;
}

void DeviceBackends::enqueued(Pending work, bool beside) const {
  if (beside) {
    beside_.push_back(std::move(work));
  } else {
    in_stream_order(work);
  }
}

Status DeviceBackends::all_gather(int32_t device, size_t from, size_t each, size_t to, bool beside) const noexcept {
  return attempted([&] {
    const auto rail = made(kRail);
    enqueued(gather(*rail.backend, bytes_at(device, to, rail.size * each), bytes_at(device, from, each), beside), beside);
  });
}

Status DeviceBackends::all_to_all(
    int32_t device,
    std::array<size_t, 2> at,
    rust::Slice<const size_t> sent,
    rust::Slice<const size_t> received,
    bool beside) const noexcept {
  return attempted([&] {
    auto input = bytes_at(device, at[0], sum_of(sent));
    auto output = bytes_at(device, at[1], sum_of(received));
    std::vector<int64_t> input_lengths(sent.begin(), sent.end());
    std::vector<int64_t> output_lengths(received.begin(), received.end());
    ::c10d::AllToAllOptions options;
    options.asyncOp = beside;
    enqueued(made(kRail).backend->alltoall_base(output, input, output_lengths, input_lengths, options), beside);
  });
}

Status DeviceBackends::broadcast(int32_t device, size_t root, size_t at, size_t bytes, bool beside) const noexcept {
  return attempted([&] {
    std::vector<at::Tensor> tensors{bytes_at(device, at, bytes)};
    ::c10d::BroadcastOptions options;
    options.rootRank = static_cast<int64_t>(root);
    options.asyncOp = beside;
    enqueued(made(kRail).backend->broadcast(tensors, options), beside);
  });
}

// Messages with other ranks, on a stream of the backend's own: those of several backends do not wait for each other.
Status DeviceBackends::exchange(
    uint32_t which,
    int32_t device,
    rust::Slice<const Span> give,
    rust::Slice<const Span> take) const noexcept {
  return attempted([&] {
    const auto backend = made(which).backend;
    backend->startCoalescing();
    try {
      for (size_t rank = 0; rank < give.size(); ++rank) {
        std::vector<at::Tensor> sent{bytes_at(device, give[rank].addr, give[rank].bytes)};
        std::vector<at::Tensor> received{bytes_at(device, take[rank].addr, take[rank].bytes)};
        if (give[rank].bytes > 0) {
          backend->send(sent, static_cast<int>(rank), 0);
        }
        if (take[rank].bytes > 0) {
          backend->recv(received, static_cast<int>(rank), 0);
        }
      }
    } catch (...) {
      // The first failure stands, even if the end of the block raises another one.
      attempted([&] { backend->endCoalescing(); });
      throw;
    }
    beside_.push_back(backend->endCoalescing());
  });
}

void DeviceBackends::abort(uint32_t which) const noexcept {
  attempted([&] {
    Engine backend;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      *aborted_ = true;
      if (const auto found = made_.find(which); found != made_.end()) {
        backend = found->second.backend;
      }
    }
    if (backend) {
      backend->abort();
    }
  });
}

void DeviceBackends::close() const noexcept {
  attempted([&] {
    std::map<uint32_t, Made> made;
    bool aborted = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::swap(made, made_);
      aborted = aborted_->exchange(true);
    }
    for (const auto& [which, each] : made) {
      if (!aborted) {
        each.backend->shutdown();
      }
    }
  });
}

} // namespace symm
