#include "hosts/backend_rail.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace symm {

namespace {

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

Status BackendRail::engines(rust::Str named, rust::String& cpu, rust::String& cuda) const noexcept {
  try {
    const auto [of_cpu, of_cuda] = symm::engines().find(std::string(named));
    cpu = rust::String::lossy(of_cpu);
    cuda = rust::String::lossy(of_cuda);
    return {Kind::None, {}};
  } catch (const std::exception& error) {
    return {Kind::Value, rust::String::lossy(error.what())};
  }
}

Status BackendRail::make(rust::Str engine, rust::Str name, size_t host, size_t hosts, int64_t timeout_ms) const noexcept {
  return attempted([&] {
    backend_ = maker_.make(engine, name, host, hosts, timeout_ms, given_up_);
    hosts_ = hosts;
  });
}

void BackendRail::give_up() const noexcept {
  *given_up_ = true;
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
    const auto due = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
    try {
      // Work of a Python class may be none, where all is done at once.
      ended = !work || work->wait(std::chrono::milliseconds(limit_ms));
    } catch (...) {
      // The transfer has failed, or the time has passed: and the transfer may have ended just then.
      ended = work->isCompleted();
      if (const auto error = ended ? work->exception() : nullptr) {
        std::rethrow_exception(error);
      }
      // Work of a Python class does not say whether it has ended.
      if (!ended && std::chrono::steady_clock::now() < due) {
        throw;
      }
    }
    if (ended) {
      works_.pop_front();
    }
  });
  return ended || status.kind != Kind::None ? status : Status{Kind::WaitTimeout, "the transfer goes on"};
}

} // namespace symm
