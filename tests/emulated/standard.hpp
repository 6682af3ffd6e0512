// The host's headers that emulated kernels include, apart so that they are compiled once for all kernels.
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
