#include "internode/transport.hpp"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "internode/backend_factory.hpp"

namespace symm {

namespace {

using Work = c10::intrusive_ptr<::c10d::Work>;
using Keep = std::shared_ptr<BufferHandle>;

at::TensorOptions bytes_on(int32_t device) {
  const auto options = at::TensorOptions(at::kByte);
  return device < 0 ? options.device(at::kCPU)
                    : options.device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

class Buffer final : public BufferHandle {
 public:
  explicit Buffer(at::Tensor memory) : memory_(std::move(memory)) {}
  size_t address() const noexcept override {
    return reinterpret_cast<size_t>(memory_.data_ptr());
  }

 private:
  at::Tensor memory_;
};

class Pending final : public PendingHandle {
 public:
  // A backend in Python may return no work if the transfer has ended already.
  explicit Pending(Work work) : work_(std::move(work)) {}

  Status wait(int64_t limit_ms) const noexcept override {
    bool ended = false;
    const auto status = attempted([&] {
      const std::chrono::milliseconds limit(limit_ms);
      const auto due = std::chrono::steady_clock::now() + limit;
      try {
        ended = !work_ || work_->wait(limit);
      } catch (...) {
        // Either the transfer has failed, or the time has passed; the transfer may still have ended
        // meanwhile.
        ended = work_->isCompleted();
        if (const auto error = ended ? work_->exception() : nullptr) {
          std::rethrow_exception(error);
        }
        // An exception before the deadline is a failure even if the transfer has not ended, because
        // work of a Python class does not say whether it has.
        if (!ended && std::chrono::steady_clock::now() < due) {
          throw;
        }
      }
    });
    return ended || status.kind != ErrorKind::None
               ? status
               : Status{ErrorKind::WaitTimeout, "the transfer goes on"};
  }

  // With asyncOp=false, NCCL may return no work, because it has used the current stream already.
  Status follow() const noexcept override {
    return attempted([&] {
      if (work_) {
        work_->synchronize();
      }
    });
  }

  Status abort() const noexcept override {
    return attempted([&] {
      if (work_) {
        work_->abort();
      }
    });
  }

 private:
  Work work_;
};

// Starts a transfer by calling `start`.
template <typename Start>
Started begun(Start&& start) noexcept {
  Started started;
  started.status = attempted([&] { started.work = std::make_shared<Pending>(start()); });
  return started;
}

template <typename Options>
Options options_of(const Manner& manner) {
  Options options;
  options.asyncOp = manner.overlap;
  if (manner.timeout_ms > 0) {
    options.timeout = std::chrono::milliseconds(manner.timeout_ms);
  }
  return options;
}

class Transport final : public TransportHandle {
 public:
  Transport(BackendPtr backend, int32_t device)
      : backend_(std::move(backend)), options_(bytes_on(device)) {}

  Started all_gather(const Span& from, const Span& to, const Keep& keep, const Manner& manner)
      const noexcept override {
    return begun([&] {
      auto input = bytes_at(from, keep);
      auto output = bytes_at(to, keep);
      return backend_->_allgather_base(output, input, options_of<::c10d::AllgatherOptions>(manner));
    });
  }

  Started all_to_all(
      const Span& from,
      rust::Slice<const size_t> sent,
      const Span& to,
      rust::Slice<const size_t> received,
      const Keep& keep,
      const Manner& manner) const noexcept override {
    return begun([&] {
      auto input = bytes_at(from, keep);
      auto output = bytes_at(to, keep);
      std::vector<int64_t> input_lengths(sent.begin(), sent.end());
      std::vector<int64_t> output_lengths(received.begin(), received.end());
      return backend_->alltoall_base(
          output, input, output_lengths, input_lengths,
          options_of<::c10d::AllToAllOptions>(manner));
    });
  }

  Started broadcast(
      size_t root, const Span& at, const Keep& keep, const Manner& manner) const noexcept override {
    return begun([&] {
      std::vector<at::Tensor> tensors{bytes_at(at, keep)};
      auto options = options_of<::c10d::BroadcastOptions>(manner);
      options.rootRank = static_cast<int64_t>(root);
      return backend_->broadcast(tensors, options);
    });
  }

  Started send(size_t to, const Span& from, int32_t tag, const Keep& keep) const noexcept override {
    return begun([&] {
      std::vector<at::Tensor> tensors{bytes_at(from, keep)};
      return backend_->send(tensors, static_cast<int>(to), tag);
    });
  }

  Started recv(size_t from, const Span& to, int32_t tag, const Keep& keep) const noexcept override {
    return begun([&] {
      std::vector<at::Tensor> tensors{bytes_at(to, keep)};
      return backend_->recv(tensors, static_cast<int>(from), tag);
    });
  }

  // Runs on the backend's own stream, so that messages of several backends do not wait for each
  // other.
  Started exchange(
      rust::Slice<const Span> give, rust::Slice<const Span> take) const noexcept override {
    return begun([&] {
      backend_->startCoalescing();
      try {
        for (size_t rank = 0; rank < give.size(); ++rank) {
          std::vector<at::Tensor> sent{bytes_at(give[rank], nullptr)};
          std::vector<at::Tensor> received{bytes_at(take[rank], nullptr)};
          if (give[rank].bytes > 0) {
            backend_->send(sent, static_cast<int>(rank), 0);
          }
          if (take[rank].bytes > 0) {
            backend_->recv(received, static_cast<int>(rank), 0);
          }
        }
      } catch (...) {
        // The first failure is kept, even if the end of the block raises another one.
        attempted([&] { backend_->endCoalescing(); });
        throw;
      }
      return backend_->endCoalescing();
    });
  }

  void abort() const noexcept override {
    attempted([&] { backend_->abort(); });
  }

  void shutdown() const noexcept override {
    attempted([&] { backend_->shutdown(); });
  }

 private:
  // Returns a tensor of the bytes of `span`. The tensor keeps `keep`, which owns the bytes, alive;
  // if `keep` is null, the caller keeps the bytes.
  at::Tensor bytes_at(const Span& span, const Keep& keep) const {
    if (span.bytes == 0) {
      return at::empty({0}, options_);
    }
    // This variable must outlive `maker`, which refers to it.
    const auto length = static_cast<int64_t>(span.bytes);
    auto maker = at::for_blob(reinterpret_cast<void*>(span.addr), length);
    if (keep) {
      maker.deleter([keep](void*) {});
    }
    return maker.options(options_).target_device(options_.device()).make_tensor();
  }

  const BackendPtr backend_;
  const at::TensorOptions options_;
};

} // namespace

Status Transports::find(rust::Str named, rust::String& cpu, rust::String& cuda) const noexcept {
  try {
    const auto [of_cpu, of_cuda] = backend_factories().find(std::string(named));
    cpu = rust::String::lossy(of_cpu);
    cuda = rust::String::lossy(of_cuda);
    return {ErrorKind::None, {}};
  } catch (const std::exception& error) {
    return {ErrorKind::Value, rust::String::lossy(error.what())};
  }
}

Connected Transports::connect(
    rust::Str backend,
    rust::Str name,
    const Seat& seat,
    int64_t timeout_ms,
    bool patient,
    rust::Box<GivenUp> given_up) const noexcept {
  Connected connected;
  connected.status = attempted([&] {
    const std::string called(name);
    const auto flag = std::make_shared<rust::Box<GivenUp>>(std::move(given_up));
    auto made = backend_factories().make(
        std::string(backend),
        group_ + "/" + called,
        meeting_store(called, store_, [flag] { return (*flag)->is_set(); }, patient),
        static_cast<int>(seat.rank),
        static_cast<int>(seat.size),
        std::chrono::milliseconds(timeout_ms),
        seat.device);
    connected.transport = std::make_shared<Transport>(std::move(made), seat.device);
  });
  return connected;
}

Allocated Transports::allocate(int32_t device, size_t bytes) const noexcept {
  Allocated allocated;
  allocated.status = attempted([&] {
    allocated.buffer =
        std::make_shared<Buffer>(at::empty({static_cast<int64_t>(bytes)}, bytes_on(device)));
  });
  return allocated;
}

} // namespace symm
