#include "fused/workspace.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <map>
#include <utility>

#include "compat.hpp"
#include "symm/src/bridge.rs.h"
#include "symm_mem/symm_ops.hpp"

namespace symm {

namespace {

namespace symmetric = ::c10d::symmetric_memory;

// Pieces begin at its multiples, so that a workspace is not made anew for a little more.
constexpr size_t kGrain = size_t(2) << 20;
// A piece above this is the only one: the barrier that it costs is short beside such a call.
constexpr size_t kManyPieces = size_t(64) << 20;
// The group's own limit.
constexpr size_t kGroupTimeout = 0;

using Key = std::pair<std::string, at::Device>;

struct Less {
  bool operator()(const Key& a, const Key& b) const {
    return std::tuple(a.first, a.second.type(), a.second.index()) < std::tuple(b.first, b.second.type(), b.second.index());
  }
};

struct All {
  std::mutex mutex;
  // Guarded by mutex.
  std::map<Key, std::shared_ptr<Workspace>, Less> workspaces;
};

All& all() {
  // Never destroyed: the driver may be gone when the process ends.
  static auto* const all = new All();
  return *all;
}

// Whether the current stream records a graph.
bool recording(at::Device device) {
  if (device.is_cpu()) {
    return false;
  }
  const auto& interface = *c10::impl::getDeviceGuardImpl(device.type());
  return capture_of(native_stream(interface, interface.getStream(device))) != 0;
}

} // namespace

Workspace::Workspace(std::string group_name, at::Device device, const c10::intrusive_ptr<::c10d::ProcessGroup>& group)
    : lanes(device), group_name_(std::move(group_name)), group_(group), rank_(group->getRank()), size_(group->getSize()) {}

std::shared_ptr<Workspace> Workspace::of(const std::string& group_name, at::Device device) {
  const auto group = ::c10d::resolve_process_group(group_name);
  // Let go outside of the lock: giving memory back waits for the device.
  std::vector<std::shared_ptr<Workspace>> dead;
  auto& known = all();
  std::lock_guard<std::mutex> lock(known.mutex);
  auto& place = known.workspaces[{group_name, device}];
  if (!place || place->group_.lock() != group) {
    // Not even its streams can be made then.
    TORCH_CHECK(
        !recording(device),
        "group \"", group_name, "\" has no workspace, which cannot be made while a graph is recorded; call the operator once before");
    dead.push_back(std::exchange(place, std::make_shared<Workspace>(group_name, device, group)));
  }
  return place;
}

void Workspace::drop(const std::string& group_name) {
  std::vector<std::shared_ptr<Workspace>> dead;
  {
    auto& known = all();
    std::lock_guard<std::mutex> lock(known.mutex);
    for (auto at = known.workspaces.begin(); at != known.workspaces.end();) {
      if (at->first.first == group_name || at->second->group_.expired()) {
        dead.push_back(std::move(at->second));
        at = known.workspaces.erase(at);
      } else {
        ++at;
      }
    }
  }
}

Turn Workspace::begin(size_t bytes, const char* op) {
  lanes.begin();
  const auto capture = lanes.capture();
  if (bytes > piece_bytes_) {
    TORCH_CHECK(
        capture == 0,
        op, ": group \"", group_name_, "\" has ", piece_bytes_, " bytes of workspace and needs ", bytes,
        ", which cannot be made while a graph is recorded; call it once with these shapes before");
    grow(bytes, op);
  }
  const bool recorded = capture != 0;
  recorded_ |= recorded;
  if (pieces_ == 1) {
    return {0, true};
  }
  const bool first = recorded && std::exchange(capture_, capture) != capture;
  const auto piece = 2 * size_t(recorded) + calls_[recorded]++ % 2;
  return {piece * piece_bytes_, first};
}

void Workspace::abandon() noexcept {
  try {
    lanes.end();
  } catch (...) {
    // The device serves no one any more; the first failure says why.
  }
}

void Workspace::grow(size_t bytes, const char* op) {
  const auto piece = std::max(piece_bytes_, (bytes + kGrain - 1) / kGrain * kGrain);
  // What is recorded into graphs has pieces of its own; on the CPU nothing is.
  const size_t pieces = piece > kManyPieces ? 1 : device().is_cpu() ? 2 : 4;
  if (recorded_) {
    // Graphs hold its addresses, and use it as before: nobody else does from now on.
    kept_.push_back({std::move(memory_), std::move(window_)});
    recorded_ = false;
  }
  // Peers read what is given up: all of them have ended that when they come to the rendezvous.
  lanes.settle();
  const auto total = times(op, static_cast<int64_t>(piece), static_cast<int64_t>(pieces));
  auto memory = symmetric::empty_strided_p2p({total}, {1}, at::kByte, device(), group_name_, std::nullopt);
  auto window = symmetric::rendezvous(memory, group_name_);
  TORCH_CHECK(window, op, ": group \"", group_name_, "\" made no window of ", total, " bytes on ", device());
  memory_ = std::move(memory);
  window_ = std::move(window);
  piece_bytes_ = piece;
  pieces_ = pieces;
  calls_ = {};
}

at::Tensor Workspace::matrix(int rank, const Turn& turn, size_t bytes, at::IntArrayRef sizes, at::ScalarType dtype) const {
  const auto offset = static_cast<int64_t>((turn.offset + bytes) / c10::elementSize(dtype));
  return window_->get_buffer(rank, sizes, dtype, offset);
}

void Workspace::barrier(Channel channel) const {
  window_->barrier(static_cast<int>(channel), kGroupTimeout);
}

void Workspace::put_signal(int peer, Channel channel) const {
  window_->put_signal(peer, static_cast<int>(channel), kGroupTimeout);
}

void Workspace::wait_signal(int peer, Channel channel) const {
  window_->wait_signal(peer, static_cast<int>(channel), kGroupTimeout);
}

} // namespace symm
