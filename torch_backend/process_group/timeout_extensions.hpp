// Temporary extensions of a group's timeout.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace symm {

// The extensions that `addEphemeralTimeout` adds to the timeouts of later calls. Each ends when the
// first call after it has ended.
class TimeoutExtensions {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Work = c10::intrusive_ptr<::c10d::Work>;

  void add(Milliseconds by) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back({next_++, by, std::nullopt});
    any_.store(true, std::memory_order_relaxed);
  }

  // Returns true if extensions may exist; otherwise a call checks nothing else.
  bool any() const {
    return any_.load(std::memory_order_relaxed);
  }

  // Removes the extensions whose first work has ended.
  void expire() {
    std::vector<std::pair<uint64_t, Work>> begun;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& each : all_) {
        if (each.first) {
          begun.emplace_back(each.number, each.first->lock());
        }
      }
    }
    // Without the lock, because a work may run callbacks of the program. A work that no longer
    // exists has ended, because the core holds running works.
    begun.erase(
        std::remove_if(
            begun.begin(), begun.end(),
            [](const auto& each) { return each.second && !each.second->isCompleted(); }),
        begun.end());
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto ended = [&](const Extension& each) {
      return std::any_of(begun.begin(), begun.end(), [&](const auto& other) {
        return other.first == each.number;
      });
    };
    all_.erase(std::remove_if(all_.begin(), all_.end(), ended), all_.end());
    any_.store(!all_.empty(), std::memory_order_relaxed);
  }

  Milliseconds sum() {
    const std::lock_guard<std::mutex> lock(mutex_);
    Milliseconds total(0);
    for (const auto& each : all_) {
      total += each.by;
    }
    return total;
  }

  // Records a new work as the first work of every extension that does not have one yet.
  void begin(const Work& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : all_) {
      if (!each.first) {
        each.first.emplace(work);
      }
    }
  }

 private:
  struct Extension {
    uint64_t number;
    Milliseconds by;
    // The first work after the extension, once that work exists.
    std::optional<c10::weak_intrusive_ptr<::c10d::Work>> first;
  };

  std::atomic<bool> any_ = false;
  std::mutex mutex_;
  uint64_t next_ = 0;
  std::vector<Extension> all_;
};

} // namespace symm
