// Call site: where the user's program makes a call, for SYMM_DEBUG=site.
#pragma once

#include <cstdint>

#include "symm/src/bridge.rs.h"

namespace symm {

// The core's number of the innermost line outside torch and this package in the calling thread's Python stack. Waits for the GIL.
uint32_t find_call_site();

// Number of the call site if call sites are wanted; else 0, without any waiting.
inline uint32_t call_site() {
  static const bool wanted = call_sites_wanted();
  return wanted ? find_call_site() : 0;
}

} // namespace symm
