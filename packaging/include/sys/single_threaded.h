// Replaces glibc's header, with which libstdc++'s headers would refer to a symbol of glibc 2.32. A
// process with torch has threads, so the value is 0.
#pragma once

static constexpr char __libc_single_threaded = 0;
