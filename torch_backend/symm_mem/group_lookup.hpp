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

// Returns the membership in the group that torch knows as `name`: in the group of its symm backend,
// the one for `type` if it has several. A process group without one (Gloo, NCCL), or a name known
// only through torch's set_group_info, gets an accompanying group of the core, which is joined
// through its store: the first call blocks until every rank has made it. The group is left when the
// process group has ended.
MemoryGroup membership(const std::string& name, c10::DeviceType type);

// Returns the same group if this process has joined it, otherwise null, without waiting.
Group joined_group(const std::string& name, c10::DeviceType type);

} // namespace symm
