#include "hosts/backend_links.hpp"

#include <ATen/ATen.h>

#include <array>
#include <cstring>
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

at::Tensor staged(size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::kByte);
}

} // namespace

struct Link {
  c10::intrusive_ptr<::c10d::Backend> backend;
  int other = 0;
  std::mutex mutex;
  // Guarded by mutex, as all that follows.
  bool closed = false;
  // Calls of `send` that have not been confirmed, the oldest first, and how many have been.
  std::deque<std::vector<Staged>> sends;
  uint64_t confirmed = 0;
  // What is listened for, by class of traffic, the oldest first.
  std::array<std::deque<Staged>, 3> listening;

  // Hands over a copy of `bytes`. mutex must be held.
  Staged send(rust::Slice<const uint8_t> bytes, int32_t traffic) {
    Staged part{staged(bytes.size()), nullptr};
    std::memcpy(part.staging.data_ptr(), bytes.data(), bytes.size());
    std::vector<at::Tensor> tensors{part.staging};
    part.work = backend->send(tensors, other, traffic);
    return part;
  }

  // mutex must be held.
  void check_open() const {
    TORCH_CHECK(!closed, "the connection has been closed");
  }
};

std::shared_ptr<Link> BackendLinks::link(uint32_t peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = links_.find(peer);
  TORCH_CHECK(found != links_.end(), "there is no connection");
  return found->second;
}

Status BackendLinks::make(uint32_t peer, rust::Str name, bool second, int64_t timeout_ms) const noexcept {
  return attempted([&] {
    auto link = std::make_shared<Link>();
    link->backend =
        made_backend(group_, std::string(name), store_, second ? 1 : 0, 2, std::chrono::milliseconds(timeout_ms));
    link->other = second ? 0 : 1;
    const std::lock_guard<std::mutex> lock(mutex_);
    links_[peer] = std::move(link);
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
    parts.push_back(link->send(frame, 0));
    if (!payload.empty()) {
      parts.push_back(link->send(payload, traffic));
    }
    link->sends.push_back(std::move(parts));
  });
}

void BackendLinks::confirm(uint32_t peer, uint64_t sends) const noexcept {
  attempted([&] {
    const auto link = this->link(peer);
    const std::lock_guard<std::mutex> lock(link->mutex);
    while (link->confirmed < sends && !link->sends.empty()) {
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
    Staged part{staged(bytes), nullptr};
    std::vector<at::Tensor> tensors{part.staging};
    part.work = link->backend->recv(tensors, link->other, traffic);
    link->listening.at(static_cast<size_t>(traffic)).push_back(std::move(part));
  });
}

Status BackendLinks::wait(uint32_t peer, int32_t traffic) const noexcept {
  bool closed = false;
  const auto status = attempted([&] {
    const auto link = this->link(peer);
    c10::intrusive_ptr<::c10d::Work> work;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      closed = link->closed;
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
      closed = link->closed;
      if (!closed) {
        throw;
      }
    }
  });
  return closed ? Status{Kind::Aborted, "the connection has been closed"} : status;
}

Status BackendLinks::take(uint32_t peer, int32_t traffic, rust::Slice<uint8_t> into) const noexcept {
  return attempted([&] {
    const auto link = this->link(peer);
    const std::lock_guard<std::mutex> lock(link->mutex);
    auto& listening = link->listening.at(static_cast<size_t>(traffic));
    TORCH_CHECK(!listening.empty(), "nothing has come of class ", traffic);
    const auto& staging = listening.front().staging;
    TORCH_CHECK(static_cast<size_t>(staging.numel()) == into.size(), staging.numel(), " bytes have come, not ", into.size());
    std::memcpy(into.data(), staging.data_ptr(), into.size());
    listening.pop_front();
  });
}

void BackendLinks::close(uint32_t peer) const noexcept {
  attempted([&] {
    std::shared_ptr<Link> link;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = links_.find(peer);
      if (found == links_.end()) {
        return;
      }
      link = found->second;
    }
    std::deque<std::vector<Staged>> sends;
    std::array<std::deque<Staged>, 3> listening;
    c10::intrusive_ptr<::c10d::Backend> backend;
    {
      const std::lock_guard<std::mutex> lock(link->mutex);
      link->closed = true;
      sends.swap(link->sends);
      listening.swap(link->listening);
      backend = std::move(link->backend);
    }
    for (const auto& traffic : listening) {
      for (const auto& part : traffic) {
        part.work->abort();
      }
    }
    // What goes here closes the connection, once a thread that waits for it has let go.
  });
}

} // namespace symm
