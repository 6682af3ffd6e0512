#include "symm_mem/group_lookup.hpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <vector>

#include "gil.hpp"
#include "process_group/process_group.hpp"

namespace py = pybind11;

namespace symm {

namespace {

using TorchGroup = c10::intrusive_ptr<::c10d::ProcessGroup>;
using Options = ProcessGroupSymm::Options;

// A group of the core that accompanies a process group.
struct Side {
  // Held while joining, so that two threads join once without delaying other groups.
  std::mutex mutex;
  // Guarded by mutex; null until joined.
  Group group;
};

struct Sides {
  std::mutex mutex;
  std::list<std::pair<c10::weak_intrusive_ptr<::c10d::ProcessGroup>, std::shared_ptr<Side>>>
      of_groups;
  // set_group_info cannot be undone, so these are never removed.
  std::map<std::string, std::shared_ptr<Side>> of_infos;
};

Sides& sides() {
  // Never destroyed, because threads may use groups while the process exits.
  static auto* all = new Sides;
  return *all;
}

void leave(const std::shared_ptr<Side>& side) {
  const std::lock_guard<std::mutex> lock(side->mutex);
  if (side->group) {
    (*side->group)->shutdown();
  }
}

// Returns the accompanying group of `torch_group`, joined or not, and leaves the accompanying
// groups of process groups that have ended.
std::shared_ptr<Side> side_of(const TorchGroup& torch_group) {
  std::shared_ptr<Side> found;
  std::vector<std::shared_ptr<Side>> orphans;
  {
    auto& all = sides();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (auto it = all.of_groups.begin(); it != all.of_groups.end();) {
      const auto living = it->first.lock();
      if (!living) {
        orphans.push_back(std::move(it->second));
        it = all.of_groups.erase(it);
        continue;
      }
      if (living == torch_group) {
        found = it->second;
      }
      ++it;
    }
    if (!found) {
      found = std::make_shared<Side>();
      all.of_groups.emplace_back(torch_group, found);
    }
  }
  if (!orphans.empty()) {
    // Leaving may wait for unfinished calls.
    without_gil([&] { std::for_each(orphans.begin(), orphans.end(), leave); });
  }
  return found;
}

std::shared_ptr<Side> side_of(const std::string& info) {
  auto& all = sides();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& side = all.of_infos[info];
  if (!side) {
    side = std::make_shared<Side>();
  }
  return side;
}

// Returns options with the group's timeout and global ranks. They come from the first backend that
// has options, because all backends of a group have the same. If no backend has options, returns
// the defaults.
c10::intrusive_ptr<Options> options_beside(const TorchGroup& torch_group) {
  auto options = c10::make_intrusive<Options>();
  for (const auto device : torch_group->getDeviceTypes()) {
    try {
      const auto given = torch_group->getBackend(device.type())->getBackendOptions();
      options->timeout = given->timeout;
      options->global_ranks_in_group = given->global_ranks_in_group;
      break;
    } catch (const c10::Error&) {
      // This backend has no options.
      continue;
    }
  }
  return options;
}

Group joined(
    Side& side,
    const std::string& name,
    const c10::intrusive_ptr<::c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options) {
  const std::lock_guard<std::mutex> lock(side.mutex);
  if (!side.group) {
    TORCH_CHECK_VALUE(
        store, "symmetric memory: group \"", name,
        "\" has no store through which its ranks could meet");
    options->group_name = "symm_mem/" + name;
    side.group = join_group(
        c10::make_intrusive<::c10d::PrefixStore>(options->group_name, store), rank, size, *options,
        false);
  }
  return side.group;
}

// Returns null while another thread is joining.
Group already_joined(Side& side) {
  const std::unique_lock<std::mutex> lock(side.mutex, std::try_to_lock);
  return lock ? side.group : nullptr;
}

// Returns the backend that `backend` wraps if TORCH_DISTRIBUTED_DEBUG is DETAIL; otherwise null.
c10::intrusive_ptr<::c10d::Backend> inside(
    const c10::intrusive_ptr<::c10d::Backend>& backend) {
  // Through Python, because the wrapper's C++ header needs those of Gloo.
  const py::gil_scoped_acquire gil;
  const auto wrapped = py::getattr(py::cast(backend), "wrapped_pg", py::none());
  return wrapped.cast<c10::intrusive_ptr<::c10d::Backend>>();
}

// Returns the backend of symm that `backend` is or wraps; otherwise null.
c10::intrusive_ptr<ProcessGroupSymm> symm_of(c10::intrusive_ptr<::c10d::Backend> backend) {
  while (backend) {
    // torch's own pointer cast would keep an object that it cannot cast alive forever.
    if (auto* const found = dynamic_cast<ProcessGroupSymm*>(backend.get())) {
      return c10::intrusive_ptr<ProcessGroupSymm>::reclaim_copy(found);
    }
    backend = inside(backend);
  }
  return nullptr;
}

c10::intrusive_ptr<ProcessGroupSymm> symm_backend(
    const TorchGroup& torch_group, c10::DeviceType type) {
  auto devices = torch_group->getDeviceTypes();
  // Tries the backend for `type` first.
  std::stable_partition(
      devices.begin(), devices.end(), [&](const auto& device) { return device.type() == type; });
  for (const auto& device : devices) {
    if (auto found = symm_of(torch_group->getBackend(device.type()))) {
      return found;
    }
  }
  return nullptr;
}

TorchGroup torch_group_named(const std::string& name) {
  try {
    return ::c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

const ::c10d::symmetric_memory::GroupInfo& info_named(const std::string& name) {
  try {
    return ::c10d::symmetric_memory::get_group_info(name);
  } catch (const c10::Error&) {
    C10_THROW_ERROR(
        ValueError, "symmetric memory: there is no process group \"" + name +
                        "\": it is yet to be made (dist.init_process_group, dist.new_group), or it "
                        "has been destroyed");
  }
}

} // namespace

c10::intrusive_ptr<ProcessGroupSymm> ProcessGroupSymm::named(
    const std::string& group_name, at::Device device, const char* op) {
  const auto backend = ::c10d::resolve_process_group(group_name)->getBackend(device.type());
  auto found = symm_of(backend);
  TORCH_CHECK_VALUE(
      found, op, ": group \"", group_name, "\" has backend ", backend->getBackendName(), " for ",
      device.type(), ", not symm");
  return found;
}

MemoryGroup membership(const std::string& name, c10::DeviceType type) {
  if (const auto torch_group = torch_group_named(name)) {
    if (const auto backend = symm_backend(torch_group, type)) {
      return {backend->core(), backend->getRank(), backend->getSize()};
    }
    const auto rank = torch_group->getRank();
    const auto size = torch_group->getSize();
    const auto side = side_of(torch_group);
    const auto join = [&] {
      return joined(*side, name, torch_group->getStore(), rank, size, options_beside(torch_group));
    };
    return {without_gil(join), rank, size};
  }
  const auto& info = info_named(name);
  const auto side = side_of(name);
  const auto join = [&] {
    return joined(
        *side, name, info.store, info.rank, info.world_size, c10::make_intrusive<Options>());
  };
  return {without_gil(join), info.rank, info.world_size};
}

Group joined_group(const std::string& name, c10::DeviceType type) {
  if (const auto torch_group = torch_group_named(name)) {
    const auto backend = symm_backend(torch_group, type);
    return backend ? backend->core() : already_joined(*side_of(torch_group));
  }
  std::shared_ptr<Side> side;
  {
    auto& all = sides();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.of_infos.find(name);
    side = found == all.of_infos.end() ? nullptr : found->second;
  }
  return side ? already_joined(*side) : nullptr;
}

} // namespace symm
