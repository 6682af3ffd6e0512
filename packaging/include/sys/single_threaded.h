// In place of glibc's: libstdc++'s headers would refer to a symbol that came with glibc 2.32. A
// process with torch has threads.
#pragma once

static constexpr char __libc_single_threaded = 0;
