// Call sites: the line of the user's program that makes a call, for SYMM_DEBUG=call_site.
#pragma once

#include <cstdint>

#include "symm/src/bridge.rs.h"

namespace symm {

// Returns the core's number of the innermost line outside torch and this package in the calling
// thread's Python stack. Waits for the GIL.
uint32_t find_call_site();

// Returns the number of the call site if call sites are enabled; otherwise 0, without waiting.
inline uint32_t call_site() {
  static const bool wanted = call_sites_wanted();
  return wanted ? find_call_site() : 0;
}

} // namespace symm
