#include "fused/workspace.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <map>
#include <utility>

#include "compat.hpp"
#include "errors.hpp"
#include "symm/src/bridge.rs.h"

namespace symm {

namespace {

namespace symmetric = ::c10d::symmetric_memory;

// 0 means the group's own timeout.
constexpr size_t kGroupTimeout = 0;

using Key = std::pair<std::string, at::Device>;

struct Less {
  bool operator()(const Key& a, const Key& b) const {
    return std::tuple(a.first, a.second.type(), a.second.index()) <
           std::tuple(b.first, b.second.type(), b.second.index());
  }
};

struct All {
  std::mutex mutex;
  // Guarded by mutex.
  std::map<Key, std::shared_ptr<Workspace>, Less> workspaces;
};

All& all() {
  // Never destroyed, because the driver may be shut down when the process ends.
  static auto* const all = new All();
  return *all;
}

// Returns true if the current stream records a graph.
bool recording(at::Device device) {
  if (device.is_cpu()) {
    return false;
  }
  const auto& interface = *c10::impl::getDeviceGuardImpl(device.type());
  return capture_of(native_stream(interface, interface.getStream(device))) != 0;
}

} // namespace

Workspace::Workspace(
    std::string group_name, at::Device device,
    const c10::intrusive_ptr<::c10d::ProcessGroup>& group)
    : group_name_(std::move(group_name)),
      group_(group),
      rank_(group->getRank()),
      size_(group->getSize()),
      streams_(device),
      core_(fused_workspace(group_name_, device.is_cpu())) {}

std::shared_ptr<Workspace> Workspace::of(const std::string& group_name, at::Device device) {
  const auto group = ::c10d::resolve_process_group(group_name);
  // Dropped outside the lock, because freeing memory waits for the device.
  std::shared_ptr<Workspace> dead;
  auto& known = all();
  std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.workspaces.find({group_name, device});
  if (found != known.workspaces.end() && found->second->group_.lock() == group) {
    return found->second;
  }
  // Not even the workspace's streams can be made during a capture.
  TORCH_CHECK(
      !recording(device), "group \"", group_name,
      "\" has no workspace, which cannot be made while a graph is recorded; call the operator "
      "once before");
  auto made = std::make_shared<Workspace>(group_name, device, group);
  dead = std::exchange(known.workspaces[{group_name, device}], made);
  return made;
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

void Workspace::run(FusedOperator& op) {
  const std::lock_guard<std::mutex> turns(mutex_);
  streams_.begin();
  const auto call = begin(op);
  try {
    op.prepare(call);
    for (const auto& step : call.steps) {
      enqueue(step, op);
    }
  } catch (...) {
    abandon();
    throw;
  }
  streams_.end();
}

FusedCall Workspace::begin(FusedOperator& op) {
  auto call = op.begin(*core_, streams_.capture());
  check(call.status);
  if (call.make != 0) {
    make(call);
    core_->made();
    call = op.begin(*core_, streams_.capture());
    check(call.status);
  }
  return call;
}

void Workspace::make(const FusedCall& call) {
  // Peers may still read the memory that is replaced. A peer arrives at the rendezvous below only
  // after it has finished its reads.
  streams_.settle();
  const auto bytes = static_cast<int64_t>(call.make);
  auto memory =
      symmetric::empty_strided_p2p({bytes}, {1}, at::kByte, device(), group_name_, std::nullopt);
  auto window = symmetric::rendezvous(memory, group_name_);
  TORCH_CHECK(
      window, "group \"", group_name_, "\" made no window of ", bytes, " bytes on ", device());
  if (call.keep) {
    // Graphs hold the addresses of this memory and keep using it; later calls do not.
    kept_.push_back({std::move(memory_), std::move(window_)});
  }
  memory_ = std::move(memory);
  window_ = std::move(window);
}

void Workspace::enqueue(const FusedStep& step, FusedOperator& op) {
  const auto peer = static_cast<int>(step.rank), channel = static_cast<int>(step.channel);
  switch (step.action) {
    case FusedAction::Mark:
      return streams_.mark(step.stream, step.mark);
    case FusedAction::After:
      return streams_.after(step.stream, step.mark);
    case FusedAction::Barrier:
      return streams_.on(step.stream, [&] { window_->barrier(channel, kGroupTimeout); });
    case FusedAction::Signal:
      return streams_.on(step.stream, [&] { window_->put_signal(peer, channel, kGroupTimeout); });
    case FusedAction::Wait:
      return streams_.on(step.stream, [&] { window_->wait_signal(peer, channel, kGroupTimeout); });
    case FusedAction::Share:
    case FusedAction::Fetch:
    case FusedAction::OwnRows:
    case FusedAction::Multiply:
    case FusedAction::Sum:
      return streams_.on(step.stream, [&] { op.enqueue(step); });
  }
}

// All streams join the caller's, because the enqueued work uses memory that the caller is about to
// release.
void Workspace::abandon() noexcept {
  core_->fail();
  try {
    streams_.end();
  } catch (...) {
    // The device is unusable; the first failure reports why.
  }
}

at::Tensor Workspace::matrix(
    size_t rank, const FusedCall& call, size_t bytes, at::IntArrayRef sizes,
    at::ScalarType dtype) const {
  const auto offset = static_cast<int64_t>((call.offset + bytes) / c10::elementSize(dtype));
  return window_->get_buffer(static_cast<int>(rank), sizes, dtype, offset);
}

} // namespace symm
