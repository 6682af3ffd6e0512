// The declarations of device.cuh for host threads: kernels are compiled as C++, so that their
// protocols are tested without a GPU. Every kernel thread is one host thread, and a launch returns
// when all of them have ended. The memory is deliberately weaker than the host's: the words of a
// unit are stored and loaded one by one in a varying order, with pauses between them.
#pragma once

#include "standard.hpp"

// Not `static inline`, because it also precedes member functions.
#define DEVICE inline
#define THREADS 512
// `name` takes the address of its arguments, and `name_args` is their size in bytes.
#define KERNEL(name, Args)                                                                \
  static void name##_body(const Args& args);                                              \
  extern "C" __attribute__((visibility("default"))) const u64 name##_args = sizeof(Args); \
  extern "C" __attribute__((visibility("default"))) void name(const void* args) {         \
    name##_body(*static_cast<const Args*>(args));                                         \
  }                                                                                       \
  static void name##_body([[maybe_unused]] const Args& args)
#define LANE_KERNEL(name, Args) KERNEL(name, Args)

namespace emulated {

// The state that the threads of a block share.
struct Barrier {
  // Exited threads no longer count, as on a device.
  std::barrier<> arrived;
  // Not 0 if a thread voted no. Votes alternate between two words, so that one can be cleared while
  // no thread reads it.
  std::atomic<u32> against[2] = {0, 0};
  // Memory of `cluster_floats`.
  float floats[2048] = {};
  explicit Barrier(u32 threads) : arrived(threads) {}
};

struct Thread {
  u32 thread, threads, block, blocks, cluster_blocks;
  Barrier* barrier;
  // The state that the threads of a cluster share.
  Barrier* cluster;
  u32 loads;
  u32 votes;
  // The token that `arrive_cluster` leaves for `wait_cluster`.
  std::optional<std::barrier<>::arrival_token> arrived;
  // State of a xorshift generator; 0 in a launch without pauses.
  u64 state;
};
static thread_local Thread self;

static inline u32 random() {
  self.state ^= self.state << 13;
  self.state ^= self.state >> 7;
  self.state ^= self.state << 17;
  return static_cast<u32>(self.state >> 32);
}

// Mostly does nothing, sometimes yields to other threads, and rarely pauses long enough for a whole
// protocol round elsewhere.
static inline void pause() {
  if (self.state == 0) return;
  u32 chance = random() & 1023;
  if (chance < 16) sched_yield();
  if (chance == 1023) {
    timespec shortly{0, 50'000};
    nanosleep(&shortly, nullptr);
  }
}

// An order of the four words: `(i * step + first) & 3` for i of 0..4.
struct Order {
  u32 first, step;
  u32 operator[](u32 i) const { return (i * step + first) & 3; }
};
static inline Order order() {
  static thread_local u32 turn = 0;
  u32 chosen = self.state == 0 ? turn++ : random();
  return {chosen & 3, (chosen & 4) != 0 ? 3u : 1u};
}

// There are more threads than cores, so each spinning thread sometimes yields its core.
static inline void loaded() {
  if ((++self.loads & 63) == 0) sched_yield();
}

}  // namespace emulated

// SYMM_RANK: the ranks of a test are threads of one process.
static thread_local u32 symm_emulated_rank;

DEVICE u32 thread() { return emulated::self.thread; }
DEVICE u32 threads() { return emulated::self.threads; }
DEVICE u32 block() { return emulated::self.block; }
DEVICE u32 blocks() { return emulated::self.blocks; }
DEVICE void sync_block() {
  emulated::pause();
  emulated::self.barrier->arrived.arrive_and_wait();
}
DEVICE u32 cluster_blocks() { return emulated::self.cluster_blocks; }
DEVICE u32 cluster_block() { return block() % cluster_blocks(); }
DEVICE void arrive_cluster() {
  emulated::pause();
  emulated::self.arrived = emulated::self.cluster->arrived.arrive();
}
DEVICE void wait_cluster() {
  emulated::self.cluster->arrived.wait(std::move(*emulated::self.arrived));
}
// Memory for 2048 numbers that the threads of a cluster share.
DEVICE float* cluster_floats() { return emulated::self.cluster->floats; }
DEVICE bool sync_block_and(bool yes) {
  emulated::pause();
  emulated::Barrier& barrier = *emulated::self.barrier;
  std::atomic<u32>& against = barrier.against[emulated::self.votes++ & 1];
  if (!yes) against = 1;
  barrier.arrived.arrive_and_wait();
  const bool all = against == 0;
  barrier.arrived.arrive_and_wait();
  against = 0;
  return all;
}

DEVICE void store_relaxed(Unit* to, Unit v) {
  u32* words = reinterpret_cast<u32*>(to);
  u32 values[4] = {v.x, v.y, v.z, v.w};
  emulated::Order order = emulated::order();
  for (u32 i = 0; i < 4; i++) {
    emulated::pause();
    __atomic_store_n(words + order[i], values[order[i]], __ATOMIC_RELAXED);
  }
}
DEVICE Unit load_relaxed(const Unit* from) {
  emulated::loaded();
  const u32* words = reinterpret_cast<const u32*>(from);
  u32 values[4];
  emulated::Order order = emulated::order();
  for (u32 i = 0; i < 4; i++)
    values[order[i]] = __atomic_load_n(words + order[i], __ATOMIC_RELAXED);
  return {values[0], values[1], values[2], values[3]};
}
DEVICE void store_relaxed(Line* to, Line v) {
  const u32 late = emulated::order().first & 1;
  const u64 values[2] = {v.first, v.second};
  for (const u32 i : {late, 1 - late}) {
    emulated::pause();
    __atomic_store_n(reinterpret_cast<u64*>(to) + i, values[i], __ATOMIC_RELAXED);
  }
}
DEVICE Line load_relaxed(const Line* from) {
  emulated::loaded();
  const u32 late = emulated::order().first & 1;
  u64 values[2];
  for (const u32 i : {late, 1 - late})
    values[i] = __atomic_load_n(reinterpret_cast<const u64*>(from) + i, __ATOMIC_RELAXED);
  return {values[0], values[1]};
}
DEVICE void store_relaxed(u32* to, u32 v) {
  emulated::pause();
  __atomic_store_n(to, v, __ATOMIC_RELAXED);
}
DEVICE u32 load_relaxed(const u32* from) {
  emulated::loaded();
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
DEVICE u32 load_acquire(const u32* from) {
  emulated::loaded();
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
DEVICE void fence_system() {
  emulated::pause();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
DEVICE u64 clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1'000'000'000 + static_cast<u64>(now.tv_nsec);
}
// A launch ends before the next one of its stream starts.
DEVICE void after_predecessor() {}
DEVICE void allow_successor() {}

#ifdef SYMM_RESIDENT
// A device that holds at most this many blocks at once, over all launches of a rank.
struct Room {
  std::counting_semaphore<> free{SYMM_RESIDENT};
};
static Room room[WORLD];
#endif

// Runs `kernel` as `rank` on blocks * threads host threads, with `cluster` blocks in a cluster, and
// returns when all have ended; `args` is 16-byte aligned. `seed` varies the pauses; 0 means no
// pauses.
extern "C" __attribute__((visibility("default"))) void symm_launch(
    void (*kernel)(const void*), u32 rank, u32 blocks, u32 threads, u32 cluster, const void* args,
    u64 seed) noexcept {
  if (threads > THREADS) {
    std::fprintf(stderr, "a block of %u threads; at most %u\n", threads, THREADS);
    std::abort();
  }
  std::vector<std::unique_ptr<emulated::Barrier>> barriers, clusters;
  for (u32 block = 0; block < blocks; block++)
    barriers.push_back(std::make_unique<emulated::Barrier>(threads));
  for (u32 block = 0; block < blocks; block += cluster)
    clusters.push_back(std::make_unique<emulated::Barrier>(threads * cluster));
  std::vector<std::atomic<u32>> left(blocks);
  for (auto& count : left) count = threads;
  std::vector<std::thread> running;
  for (u32 at = 0; at < blocks * threads; at++) {
#ifdef SYMM_RESIDENT
    if (at % threads == 0) room[rank].free.acquire();
#endif
    running.emplace_back([=, barrier = barriers[at / threads].get(),
                          together = clusters[at / threads / cluster].get(),
                          left = &left[at / threads]] {
      u64 state = seed == 0 ? 0
                            : (seed * 0x9e3779b97f4a7c15 +
                               (static_cast<u64>(rank) << 32 | at) * 0xbf58476d1ce4e5b9) |
                                  1;
      symm_emulated_rank = rank;
      emulated::self = {
          at % threads, threads, at / threads, blocks, cluster, barrier, together, 0, 0, {}, state};
      emulated::pause();
      kernel(args);
      barrier->arrived.arrive_and_drop();
      together->arrived.arrive_and_drop();
      if (left->fetch_sub(1) == 1) {
#ifdef SYMM_RESIDENT
        room[rank].free.release();
#endif
      }
    });
  }
  for (std::thread& thread : running) thread.join();
}
