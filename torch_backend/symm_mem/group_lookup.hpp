// The core's group in which ranks of a process group of torch share symmetric memory.
#pragma once

#include <c10/core/DeviceType.h>

#include <string>

#include "work/work.hpp"

namespace symm {

// This process's membership in a group of the core.
struct MemoryGroup {
  Group group;
  int rank;
  int size;
};

// Returns the membership in the core's group for torch's process group `name`. That is the group of
// its symm backend; if it has several, of the one for `type`. A process group without a symm
// backend (Gloo, NCCL), or a name known only through torch's set_group_info, gets an accompanying
// group. The ranks join it through the store of `name`: the first call blocks until every rank has
// made it. This rank leaves it when the process group has ended.
MemoryGroup membership(const std::string& name, c10::DeviceType type);

// Returns the same group if this process has joined it, otherwise null, without waiting.
Group joined_group(const std::string& name, c10::DeviceType type);

} // namespace symm
