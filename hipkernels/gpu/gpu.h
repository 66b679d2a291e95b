// One source, three builds: gfx942 (clang, HIP), sm_90a (nvcc, CUDA), and the host with one fiber per lane
// (g++ -DRLK_HOST_FIBERS -DRLK_WAVE=32 or 64; host_fibers.h). This header gives the words in which they differ.
//
//   kWave                                lanes that run in step and can shuffle
//   shuffle_down(x, n), shuffle_xor(x, n)  x of the lane n above in the wave, or of lane ^ n; all lanes must call it
//   RLK_SHARED(Type, name)               one Type for the workgroup, in LDS (CUDA: shared memory), uninitialised
//   Vector16, load16, store16            128 bits at a time of global memory; addresses are multiples of 16
//   settle_stores()                      this lane's stores have left for memory that the workgroup's lanes share
//   SystemMemory                         the memory policy of collective_protocol.h; claim(word): for its first caller
//                                        true (the word was 0 and is 1 now); load_pair, store_pair: load and store for
//                                        two words side by side, each in one piece
//   RLK_UNSET                            after a variable: not set before its first use, which g++ would not believe
//   RLK_LAUNCH(kernel, grid, block, stream, arguments...)  an Error code
//   lane_index, lane_count               of the lane in its workgroup
//   group_index, group_count             of the workgroup in its grid
// `__global__` and `__syncthreads()` are the same words everywhere.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(RLK_HOST_FIBERS)
#include <sched.h>

#include "gpu/host_fibers.h"
#elif defined(__HIP__)
#include <hip/hip_runtime.h>
#else
#include <cuda_runtime.h>
#endif

#if defined(RLK_HOST_FIBERS)
#define RLK_LANES(lanes)
#define RLK_UNSET = {}
#else
#define RLK_LANES(lanes) __launch_bounds__(lanes)
#define RLK_UNSET
#define RLK_SHARED(Type, name) __shared__ Type name
#define RLK_LAUNCH(kernel, grid, block, stream, ...) \
  (kernel<<<dim3(unsigned(grid)), dim3(block), 0, static_cast<rlk::Stream>(stream)>>>(__VA_ARGS__), rlk::launch_error())
#endif

#include "abi.h"
#include "device.h"

namespace rlk {

struct alignas(16) Vector16 {
  uint32_t word[4];
};
struct Pair64 {
  uint64_t first, second;
};

#if !defined(RLK_HOST_FIBERS)
__device__ inline int lane_index() { return int(threadIdx.x); }
__device__ inline int lane_count() { return int(blockDim.x); }
__device__ inline int group_index() { return int(blockIdx.x); }
__device__ inline int group_count() { return int(gridDim.x); }
#endif

#if defined(RLK_HOST_FIBERS)

constexpr int kWave = RLK_WAVE;

inline int lane_index() { return fibers::scheduler.lane; }
inline int lane_count() { return fibers::scheduler.group->launch->block; }
inline int group_index() { return fibers::scheduler.group->index; }
inline int group_count() { return fibers::scheduler.group->launch->grid; }
inline uint32_t shuffle_word_down(uint32_t x, int lanes) { return fibers::shuffle(x, fibers::scheduler.lane + lanes); }
inline uint32_t shuffle_word_xor(uint32_t x, int lanes) { return fibers::shuffle(x, fibers::scheduler.lane ^ lanes); }

inline Vector16 load16(const void* address) { Vector16 v; memcpy(&v, address, 16); return v; }
inline void store16(void* address, Vector16 v) { memcpy(address, &v, 16); }
inline void settle_stores() {}

struct SystemMemory {
  uint64_t poll(const uint64_t* word) const { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  void acquire() const {}
  uint64_t load(const uint64_t* word) const { return __atomic_load_n(word, __ATOMIC_RELAXED); }
  void store(uint64_t* word, uint64_t value) const { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
  Pair64 load_pair(const uint64_t* words) const { return {load(words), load(words + 1)}; }
  void store_pair(uint64_t* words, Pair64 pair) const { store(words, pair.first), store(words + 1, pair.second); }
  void store_release(uint64_t* word, uint64_t value) const { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  bool claim(uint64_t* word) const { return __atomic_exchange_n(word, 1, __ATOMIC_RELAXED) == 0; }
  void pause(uint64_t polls) const {
    if (polls % 64 == 0) sched_yield();  // the peer may be another process
    fibers::pause();
  }
  uint64_t clock_ns() const { return fibers::clock_ns(); }
};

#elif defined(__HIP__)

using Stream = hipStream_t;
inline int launch_error() { return hipGetLastError() == hipSuccess ? kOk : kLaunchFailed; }

constexpr int kWave = 64;
__device__ inline uint32_t shuffle_word_down(uint32_t x, int lanes) { return __shfl_down(x, lanes); }
__device__ inline uint32_t shuffle_word_xor(uint32_t x, int lanes) { return __shfl_xor(x, lanes); }

// With the address space spelt out these are global_load_dwordx4 and global_store_dwordx4, never flat ones.
typedef uint32_t Words4V __attribute__((ext_vector_type(4)));
__device__ inline Vector16 load16(const void* address) {
  const Words4V v = *(const __attribute__((address_space(1))) Words4V*)(address);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ inline void store16(void* address, Vector16 v) {
  *(__attribute__((address_space(1))) Words4V*)(address) = Words4V{v.word[0], v.word[1], v.word[2], v.word[3]};
}

// A barrier does not wait for the stores of the other waves, and a release waits for those of its own wave only.
__device__ inline void settle_stores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

struct SystemMemory {
  // With the address space spelt out, as above: an address that was kept in LDS would else be a flat one.
  typedef __attribute__((address_space(1))) uint64_t GlobalWord;
  __device__ uint64_t load(const uint64_t* word) const {
    return __hip_atomic_load((const GlobalWord*)word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  __device__ void store(uint64_t* word, uint64_t value) const {
    __hip_atomic_store((GlobalWord*)word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  __device__ Pair64 load_pair(const uint64_t* words) const { return {load(words), load(words + 1)}; }
  __device__ void store_pair(uint64_t* words, Pair64 pair) const {
    store(words, pair.first);
    store(words + 1, pair.second);
  }
  // Relaxed, because every acquiring poll would invalidate the caches again.
  __device__ uint64_t poll(const uint64_t* word) const { return load(word); }
  __device__ void acquire() const { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }
  __device__ void store_release(uint64_t* word, uint64_t value) const {
    __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  __device__ bool claim(uint64_t* word) const {
    return __hip_atomic_exchange(word, uint64_t(1), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM) == 0;
  }
  __device__ void pause(uint64_t) const { __builtin_amdgcn_s_sleep(1); }
  __device__ uint64_t clock_ns() const { return __builtin_amdgcn_s_memrealtime() * 10; }  // it counts at 100 MHz
};

#else

using Stream = cudaStream_t;
inline int launch_error() { return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed; }

constexpr int kWave = 32;
__device__ inline uint32_t shuffle_word_down(uint32_t x, int lanes) {
  return __shfl_down_sync(0xffffffffu, x, lanes);
}
__device__ inline uint32_t shuffle_word_xor(uint32_t x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }

__device__ inline Vector16 load16(const void* address) {
  const uint4 v = *static_cast<const uint4*>(address);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ inline void store16(void* address, Vector16 v) {
  *static_cast<uint4*>(address) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}
__device__ inline void settle_stores() {}  // a release is cumulative over barriers

struct SystemMemory {
  __device__ uint64_t poll(const uint64_t* word) const {
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  __device__ void acquire() const {}  // every poll has acquired
  __device__ uint64_t load(const uint64_t* word) const {
    uint64_t value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  __device__ void store(uint64_t* word, uint64_t value) const {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  __device__ Pair64 load_pair(const uint64_t* words) const {
    Pair64 pair;
    asm volatile("ld.relaxed.sys.v2.u64 {%0, %1}, [%2];" : "=l"(pair.first), "=l"(pair.second) : "l"(words) : "memory");
    return pair;
  }
  __device__ void store_pair(uint64_t* words, Pair64 pair) const {
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(pair.first), "l"(pair.second) : "memory");
  }
  __device__ void store_release(uint64_t* word, uint64_t value) const {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  __device__ bool claim(uint64_t* word) const {
    uint64_t old;
    asm volatile("atom.relaxed.sys.exch.b64 %0, [%1], 1;" : "=l"(old) : "l"(word) : "memory");
    return old == 0;
  }
  __device__ void pause(uint64_t polls) const {
    if (polls > 1024) __nanosleep(100);  // a peer that is this late will not be missed by 100 ns
  }
  __device__ uint64_t clock_ns() const {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
};

#endif

template <class T, class Shuffle> RLK_DEVICE inline T shuffle_words(T x, Shuffle shuffle) {
  constexpr int kWords = sizeof(T) / sizeof(uint32_t);
  static_assert(kWords * sizeof(uint32_t) == sizeof(T), "shuffles move whole words");
  uint32_t word[kWords];
  memcpy(word, &x, sizeof(T));
  RLK_UNROLL
  for (int i = 0; i < kWords; ++i) word[i] = shuffle(word[i]);
  memcpy(&x, word, sizeof(T));
  return x;
}
template <class T> RLK_DEVICE inline T shuffle_down(T x, int lanes) {
  return shuffle_words(x, [=](uint32_t word) { return shuffle_word_down(word, lanes); });
}
template <class T> RLK_DEVICE inline T shuffle_xor(T x, int lanes) {
  return shuffle_words(x, [=](uint32_t word) { return shuffle_word_xor(word, lanes); });
}

}  // namespace rlk
