#include "hosts/backend_links.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

namespace symm {

// One transfer with its staging.
struct Staged {
  at::Tensor staging;
  c10::intrusive_ptr<::c10d::Work> work;
};

namespace {

// Gloo's waits break the connection when their time passes: this one does not. Ten years.
constexpr std::chrono::milliseconds kEver(10L * 365 * 24 * 3600 * 1000);

// `Traffic::Frame` of src/hosts/messages/links.rs.
constexpr int32_t kFrame = 0;
// Staging that is kept for later transfers: fresh memory has to be given, page by page, by the system.
constexpr size_t kSpare = 16;
// Shorter staging costs nothing to make.
constexpr size_t kWorthKeeping = 16 << 10;

} // namespace

struct Link {
  const GivenUp closed = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex;
  // Guarded by mutex, as all that follows.
  Engine backend;
  int other = 0;
  // Calls of `send` that have not been confirmed, the oldest first, and how many have been.
  std::deque<std::vector<Staged>> sends;
  uint64_t confirmed = 0;
  // What is listened for, by class of traffic, the oldest first.
  std::array<std::deque<Staged>, 2> listening;
  // What has been waited for last, until it is released.
  std::array<at::Tensor, 2> arrived;
  std::vector<at::Tensor> spare;

  // Staging of `bytes` bytes. mutex must be held.
  at::Tensor staged(size_t bytes) {
    const auto fits = [&](const at::Tensor& kept) {
      const auto size = static_cast<size_t>(kept.numel());
      return bytes > kWorthKeeping && size >= bytes && size <= 4 * bytes;
    };
    const auto length = static_cast<int64_t>(bytes);
    const auto found = std::find_if(spare.begin(), spare.end(), fits);
    if (found == spare.end()) {
      return at::empty({length}, at::kByte);
    }
    const auto kept = std::move(*found);
    spare.erase(found);
    return kept.narrow(0, 0, length);
  }

  // Keeps the memory of `staging`, which nothing uses any more. mutex must be held.
  void keep(const at::Tensor& staging) {
    if (staging.defined() && staging.storage().nbytes() > kWorthKeeping && spare.size() < kSpare) {
      spare.push_back(staging.as_strided({static_cast<int64_t>(staging.storage().nbytes())}, {1}, 0));
    }
  }

  // Hands over copies of `head` and `tail`, one behind the other. mutex must be held.
  Staged send(rust::Slice<const uint8_t> head, rust::Slice<const uint8_t> tail, int32_t traffic) {
    Staged part{staged(head.size() + tail.size()), nullptr};
    auto* const to = part.staging.mutable_data_ptr<uint8_t>();
    std::copy(head.begin(), head.end(), to);
    std::copy(tail.begin(), tail.end(), to + head.size());
    std::vector<at::Tensor> tensors{part.staging};
    part.work = backend->send(tensors, other, traffic);
    return part;
  }

  // mutex must be held.
  void check_open() const {
    TORCH_CHECK(!*closed, "the connection has been closed");
  }
};

std::shared_ptr<Link> BackendLinks::link(uint32_t peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = links_.find(peer);
  TORCH_CHECK(found != links_.end(), "there is no connection");
  return found->second;
}

std::shared_ptr<Link> BackendLinks::entry(uint32_t peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& link = links_[peer];
  if (!link) {
    link = std::make_shared<Link>();
  }
  return link;
}

Status BackendLinks::make(uint32_t peer, rust::Str engine, rust::Str name, bool second, int64_t timeout_ms) const noexcept {
  return attempted([&] {
    const auto link = entry(peer);
    auto backend = maker_.make(engine, name, second ? 1 : 0, 2, timeout_ms, link->closed);
    const std::lock_guard<std::mutex> lock(link->mutex);
    link->check_open();
    link->backend = std::move(backend);
    link->other = second ? 0 : 1;
  });
}

Status BackendLinks::send(
    uint32_t peer,
    rust::Slice<const uint8_t> frame,
    int32_t traffic,
    rust::Slice<const uint8_t> payload) const noexcept {
  return attempted([&] {
    const auto link = this->link(peer);
    const std::lock_guard<std::mutex> lock(link->mutex);
    link->check_open();
    std::vector<Staged> parts;
    const rust::Slice<const uint8_t> nothing;
    if (traffic == kFrame) {
      parts.push_back(link->send(frame, payload, kFrame));
    } else {
      parts.push_back(link->send(frame, nothing, kFrame));
      parts.push_back(link->send(payload, nothing, traffic));
    }
    link->sends.push_back(std::move(parts));
  });
}

void BackendLinks::confirm(uint32_t peer, uint64_t sends) const noexcept {
  attempted([&] {
    const auto link = this->link(peer);
    const std::lock_guard<std::mutex> lock(link->mutex);
    while (link->confirmed < sends && !link->sends.empty()) {
      for (const auto& part : link->sends.front()) {
        link->keep(part.staging);
      }
      link->sends.pop_front();
      ++link->confirmed;
    }
  });
}

Status BackendLinks::listen(uint32_t peer, int32_t traffic, size_t bytes) const noexcept {
  return attempted([&] {
    const auto link = this->link(peer);
    const std::lock_guard<std::mutex> lock(link->mutex);
    link->check_open();
    Staged part{link->staged(bytes), nullptr};
    std::vector<at::Tensor> tensors{part.staging};
    part.work = link->backend->recv(tensors, link->other, traffic);
    link->listening.at(static_cast<size_t>(traffic)).push_back(std::move(part));
  });
}

Status BackendLinks::wait(uint32_t peer, int32_t traffic, size_t& address) const noexcept {
  bool closed = false;
  const auto status = attempted([&] {
    const auto link = this->link(peer);
    c10::intrusive_ptr<::c10d::Work> work;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      closed = *link->closed;
      if (closed) {
        return;
      }
      const auto& listening = link->listening.at(static_cast<size_t>(traffic));
      TORCH_CHECK(!listening.empty(), "nothing is listened for of class ", traffic);
      work = listening.front().work;
    }
    try {
      // False where `close` has ended it.
      closed = !work->wait(kEver);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(link->mutex);
      closed = *link->closed;
      if (!closed) {
        throw;
      }
    }
    const std::lock_guard<std::mutex> lock(link->mutex);
    closed = closed || *link->closed;
    if (closed) {
      return;
    }
    auto& listening = link->listening.at(static_cast<size_t>(traffic));
    auto& arrived = link->arrived.at(static_cast<size_t>(traffic));
    // Closing the link leaves it alone.
    arrived = std::move(listening.front().staging);
    listening.pop_front();
    address = reinterpret_cast<size_t>(arrived.data_ptr());
  });
  return closed ? Status{Kind::Aborted, "the connection has been closed"} : status;
}

void BackendLinks::release(uint32_t peer, int32_t traffic) const noexcept {
  attempted([&] {
    const auto link = this->link(peer);
    const std::lock_guard<std::mutex> lock(link->mutex);
    auto& arrived = link->arrived.at(static_cast<size_t>(traffic));
    link->keep(arrived);
    arrived = at::Tensor();
  });
}

void BackendLinks::close(uint32_t peer) const noexcept {
  attempted([&] {
    const auto link = entry(peer);
    std::deque<std::vector<Staged>> sends;
    std::array<std::deque<Staged>, 2> listening;
    Engine backend;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      *link->closed = true;
      sends.swap(link->sends);
      listening.swap(link->listening);
      backend = std::move(link->backend);
    }
    bool aborted = true;
    for (const auto& traffic : listening) {
      for (const auto& part : traffic) {
        aborted = attempted([&] { part.work->abort(); }).kind == Kind::None && aborted;
      }
    }
    if (!aborted && backend) {
      backend->abort();
    }
    // What goes here closes the connection, once a thread that waits for it has let go.
  });
}

} // namespace symm
