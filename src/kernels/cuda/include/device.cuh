// Machine interface of the kernels: 16-byte units, ordered loads and stores, the clock. No other
// file has inline PTX for these. NVRTC compiles this file without any CUDA header. A C++ compiler
// compiles it with SYMM_EMULATED, where host threads act as the kernel's threads (tests/emulated).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The number of ranks and this rank are compile-time constants: loops over peers unroll, and the
// order of the peers costs nothing.
#define WORLD SYMM_WORLD
#define RANK SYMM_RANK

// A unit of 16 bytes, the size of one load or store.
struct alignas(16) Unit {
  u32 x, y, z, w;
};

// An LL line: 16 bytes whose halves are each stored and loaded atomically.
struct alignas(16) Line {
  u64 first, second;
};

#ifdef SYMM_EMULATED
#include "emulated.hpp"
#else

#define DEVICE __device__ __forceinline__
#define THREADS 512
// Maximum number of threads in a block of a lane; fewer than THREADS, so that each thread may have
// more registers.
#define LANE_THREADS 256
// A kernel is one C function with one argument, passed by value and read in place.
#define KERNEL_OF(name, Args, most) \
  extern "C" __global__ void __launch_bounds__(most, 1) name(const __grid_constant__ Args args)
#define KERNEL(name, Args) KERNEL_OF(name, Args, THREADS)
#define LANE_KERNEL(name, Args) KERNEL_OF(name, Args, LANE_THREADS)

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 threads() { return blockDim.x; }
DEVICE u32 block() { return blockIdx.x; }
DEVICE u32 blocks() { return gridDim.x; }
// Returns once every thread of the block has arrived; their writes are visible to the block.
DEVICE void sync_block() { __syncthreads(); }
// Returns once every thread of the block has arrived: true if `yes` is true for all. Their writes
// are visible to the block.
DEVICE bool sync_block_and(bool yes) { return __syncthreads_and(yes) != 0; }

// Returns the number of blocks in this cluster, which run at the same time and share their shared
// memory; 1 without clusters.
DEVICE u32 cluster_blocks() {
  u32 count = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0,%%cluster_nctaid.x;" : "=r"(count));
#endif
  return count;
}
// Returns the index of this block in its cluster.
DEVICE u32 cluster_block() {
  u32 place = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0,%%cluster_ctaid.x;" : "=r"(place));
#endif
  return place;
}
// The two halves of one barrier of the cluster, called alternately: `wait_cluster` (acquire)
// returns once every thread of the cluster has called `arrive_cluster` (release). Their writes are
// visible to the cluster.
DEVICE void arrive_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
DEVICE void wait_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// Stores to the address `shared` in the shared memory of block `to` of the cluster; that block must
// have started.
DEVICE void store_in_cluster(float* shared, u32 to, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .u64 own;\n\t.reg .u32 at;\n\tcvta.to.shared.u64 own,%0;\n\t"
      "cvt.u32.u64 at,own;\n\tmapa.shared::cluster.u32 at,at,%1;\n\t"
      "st.shared::cluster.f32 [at],%2;}" ::"l"(shared), "r"(to), "f"(value)
      : "memory");
#else
  *shared = value;
#endif
}

// Relaxed stores and loads are of single words that other processors write or read at the same
// time. A unit may be torn between its words.
DEVICE void store_relaxed(Unit* to, Unit v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
DEVICE Unit load_relaxed(const Unit* from) {
  Unit v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
DEVICE void store_relaxed(Line* to, Line v) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0],{%1,%2};" ::"l"(to), "l"(v.first), "l"(v.second)
               : "memory");
}
DEVICE Line load_relaxed(const Line* from) {
  Line v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1},[%2];"
               : "=l"(v.first), "=l"(v.second)
               : "l"(from)
               : "memory");
  return v;
}
DEVICE void store_relaxed(u32* to, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(to), "r"(v) : "memory");
}
DEVICE u32 load_relaxed(const u32* from) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
// Loads a word with acquire ordering: afterwards the writes that were released with its value are
// visible to this thread, and after a sync_block to the whole block.
DEVICE u32 load_acquire(const u32* from) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
// A fence for all GPUs and the host: the earlier reads and writes of this thread precede its later
// ones, and so do the reads and writes of its block before the last sync_block.
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Returns this processor's time in nanoseconds; clocks of two processors differ.
DEVICE u64 clock_ns() {
  u64 t;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}
// Returns once the previous kernel in the stream is complete; nothing that it wrote may be read
// earlier.
DEVICE void after_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows the next kernel of the stream to start before this one ends. That kernel must call
// after_predecessor before it reads anything that this one writes.
DEVICE void allow_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif
