// The host headers that emulated kernels include, in a separate file so that they are compiled once
// for all kernels.
#ifndef SYMM_EMULATED_STANDARD
#define SYMM_EMULATED_STANDARD
#include <sched.h>
#include <time.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <semaphore>
#include <thread>
#include <vector>
#endif
