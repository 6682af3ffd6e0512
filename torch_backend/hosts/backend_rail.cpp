#include "hosts/backend_rail.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace symm {

namespace {

MakeBackend& make_backend() {
  // Never destroyed: it holds a function of Python's.
  static auto* make = new MakeBackend;
  return *make;
}

Status failed(Kind kind, const std::string& why) {
  return {kind, rust::String::lossy(why)};
}

std::vector<int64_t> lengths(rust::Slice<const size_t> bytes) {
  return {bytes.begin(), bytes.end()};
}

size_t total(rust::Slice<const size_t> bytes) {
  size_t sum = 0;
  for (const auto length : bytes) {
    sum += length;
  }
  return sum;
}

} // namespace

void make_backends_with(MakeBackend make) {
  make_backend() = std::move(make);
}

Status backend_failure() noexcept {
  try {
    throw;
  } catch (const c10::Error& error) {
    return failed(Kind::Peer, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return failed(Kind::Peer, error.what());
  } catch (...) {
    return failed(Kind::Peer, "an unknown exception");
  }
}

c10::intrusive_ptr<::c10d::Backend> made_backend(
    const std::string& group,
    const std::string& name,
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    const std::string& engine) {
  const auto prefixed = c10::make_intrusive<::c10d::PrefixStore>(name, store);
  return make_backend()(engine, group + "/" + name, prefixed, rank, size, timeout);
}

Status BackendRail::make(rust::Str name, size_t host, size_t hosts, int64_t timeout_ms) const noexcept {
  return attempted([&] {
    const auto timeout = std::chrono::milliseconds(timeout_ms);
    backend_ = made_backend(group_, std::string(name), store_, static_cast<int>(host), static_cast<int>(hosts), timeout);
    hosts_ = hosts;
  });
}

Status BackendRail::staging(size_t bytes, size_t& address) const noexcept {
  return attempted([&] {
    if (!staging_.defined() || static_cast<size_t>(staging_.numel()) < bytes) {
      staging_ = at::empty({static_cast<int64_t>(std::max<size_t>(bytes, 4096))}, at::kByte);
    }
    address = reinterpret_cast<size_t>(staging_.data_ptr());
  });
}

at::Tensor BackendRail::part(size_t at, size_t bytes) const {
  return staging_.narrow(0, static_cast<int64_t>(at), static_cast<int64_t>(bytes));
}

Status BackendRail::all_gather(size_t from, size_t each, size_t to, int64_t timeout_ms) const noexcept {
  return attempted([&] {
    auto input = part(from, each);
    auto output = part(to, hosts_ * each);
    ::c10d::AllgatherOptions options;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    works_.push_back(backend_->_allgather_base(output, input, options));
  });
}

Status BackendRail::all_to_all(
    size_t from,
    rust::Slice<const size_t> sent,
    size_t to,
    rust::Slice<const size_t> received,
    int64_t timeout_ms) const noexcept {
  return attempted([&] {
    auto input = part(from, total(sent));
    auto output = part(to, total(received));
    auto input_lengths = lengths(sent);
    auto output_lengths = lengths(received);
    ::c10d::AllToAllOptions options;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    works_.push_back(backend_->alltoall_base(output, input, output_lengths, input_lengths, options));
  });
}

Status BackendRail::broadcast(size_t root, size_t at, size_t bytes, int64_t timeout_ms) const noexcept {
  return attempted([&] {
    std::vector<at::Tensor> tensors{part(at, bytes)};
    ::c10d::BroadcastOptions options;
    options.rootRank = static_cast<int64_t>(root);
    options.timeout = std::chrono::milliseconds(timeout_ms);
    works_.push_back(backend_->broadcast(tensors, options));
  });
}

Status BackendRail::wait(int64_t limit_ms) const noexcept {
  bool ended = false;
  const auto status = attempted([&] {
    TORCH_CHECK(!works_.empty(), "no transfer is under way");
    const auto work = works_.front();
    try {
      work->wait(std::chrono::milliseconds(limit_ms));
      ended = true;
    } catch (...) {
      // The transfer has failed, or the time has passed: and the transfer may have ended just then.
      ended = work->isCompleted();
      if (const auto error = ended ? work->exception() : nullptr) {
        std::rethrow_exception(error);
      }
    }
    if (ended) {
      works_.pop_front();
    }
  });
  return ended || status.kind != Kind::None ? status : failed(Kind::WaitTimeout, "the transfer goes on");
}

} // namespace symm
