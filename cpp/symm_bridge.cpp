#include "symm_bridge.hpp"

#include <atomic>

namespace symm {

namespace {

using Forget = void (*)(size_t, size_t) noexcept;

std::atomic<Forget> forget{nullptr};

} // namespace

void forget_windows(size_t address, size_t bytes) noexcept {
  if (const auto known = forget.load()) {
    known(address, bytes);
  }
}

void on_forget_windows(Forget known) {
  forget = known;
}

} // namespace symm
