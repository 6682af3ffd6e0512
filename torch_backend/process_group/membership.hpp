// Memberships: the group of the core that ranks meet in when they name a process group of torch.
#pragma once

#include <c10/core/DeviceType.h>

#include <string>

#include "work/work.hpp"

namespace symm {

// Membership of this process in a group of the core.
struct Membership {
  Group group;
  int rank;
  int size;
};

// Membership in the group that torch knows as `name`: that of its symm backend, the one for `type` if it has several. A process group
// without one (Gloo, NCCL), or a name known only by torch's set_group_info, gets a group of the core beside it, which is joined through its
// store: the first call blocks until every rank has made it. It is left when the process group is gone.
Membership membership(const std::string& name, c10::DeviceType type);

// The same group if this process has joined it, else null: nobody is waited for.
Group joined_group(const std::string& name, c10::DeviceType type);

} // namespace symm
