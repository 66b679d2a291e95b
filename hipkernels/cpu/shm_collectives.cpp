// Collectives between processes of one host, over shared memory: the protocol of collective_protocol.h.
//
// LAYOUT. Segment of a rank: Control at offset 0, staging area at offset kStagingOffset. An all-reduce or all-gather
// stages the piece [first, first + n) of its input; a reduce-scatter stages that piece of every rank's part, part
// after part, `staging_bytes / world` apart.
//
// REDUCTION ORDER. FP32, over ranks, per element: the tree of rlk/collectives/tree.py. The left subtree takes the
// largest power of two of ranks that is smaller than all; 8 ranks give ((0+1)+(2+3))+((4+5)+(6+7)). 16-bit inputs
// are widened first and the root is rounded once. Every rank computes the sum itself from the staged inputs, so all
// have the same bits. One thread per rank; lanes run across elements.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <new>

#include "collective_protocol.h"
#include "cpu/common.h"

namespace rlk {

namespace {

constexpr int kMaxRanks = 64;
constexpr size_t kStagingOffset = 4096;
// A waiting rank spins for less than a microsecond, then offers its core at every poll (which costs a fraction of a
// microsecond when nobody wants it, and is what keeps calls fast when ranks share cores), and sleeps after about 1 ms.
constexpr uint64_t kSpins = 32, kYields = 2000;
constexpr long kSleepNs = 50'000;
constexpr int kBlock = 512;  // elements summed at a time, so that partial sums stay in L1
static_assert(sizeof(Control) <= kStagingOffset, "the control block overlaps the staging area");

struct HostMemory {
  uint64_t poll(const uint64_t* word) const { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  void acquire() const {}  // every poll has acquired
  uint64_t load(const uint64_t* word) const { return __atomic_load_n(word, __ATOMIC_RELAXED); }
  void store(uint64_t* word, uint64_t value) const { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
  void store_release(uint64_t* word, uint64_t value) const { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  uint64_t clock_ns() const {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000u + uint64_t(now.tv_nsec);
  }
  void pause(uint64_t polls) const {
    if (polls <= kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    } else if (polls <= kSpins + kYields) {
      sched_yield();
    } else {
      const timespec duration{0, kSleepNs};
      nanosleep(&duration, nullptr);
    }
  }
};

// One thread visits the peers: what it sets, it finds itself.
struct HostHalt {
  bool* halted;
  void set() const { *halted = true; }
  bool is_set() const { return *halted; }
};

struct Group {
  Control* control[kMaxRanks];
  char* staging[kMaxRanks];
  int rank, world;
  uint64_t timeout_ns;

  Peer peer(int rank) const { return {control[rank], rank, timeout_ns}; }
};

struct Communicator {
  Group group;
  HostMemory memory;
  size_t staging_bytes;
  uint64_t generation = 0;  // this rank's own; peers keep theirs
  Failure failure{};

  // One generation: stage() writes this rank's staging area, read() takes from everybody's.
  template <class Stage, class Read> int exchange(const Call& call, Stage stage, Read read) {
    ++generation;
    bool halted = false;
    const HostHalt halt{&halted};
    Control& mine = *group.control[group.rank];
    for (int peer = 0; peer < group.world; ++peer)
      if (!wait_until_released(memory, halt, group.peer(peer), generation - 1, &failure)) return kTimeout;
    stage(group.staging[group.rank]);
    describe_call(memory, mine, generation, call);
    publish_ready(memory, mine, generation);
    for (int peer = 0; peer < group.world; ++peer)
      if (!wait_until_staged(memory, halt, group.peer(peer), generation, &failure)) return kTimeout;
    for (int peer = 0; peer < group.world; ++peer)
      if (!compare_calls(memory, halt, group.peer(peer), generation, call, &failure)) return kTimeout;
    read();
    publish_done(memory, mine, generation);
    return kOk;
  }
};

// sum[0..n) = tree over ranks [first, first + ranks) of part[0..n) at `offset` bytes into each staging area.
template <class T>
void tree_sum(const Group& group, size_t offset, int n, int first, int ranks, float* __restrict sum) {
  const auto input = [&](int rank) { return reinterpret_cast<const T*>(group.staging[rank] + offset); };
  if (ranks == 1) {
    const T* x = input(first);
    for (int i = 0; i < n; ++i) sum[i] = to_float(x[i]);
  } else if (ranks == 2) {
    const T *x = input(first), *y = input(first + 1);
    for (int i = 0; i < n; ++i) sum[i] = to_float(x[i]) + to_float(y[i]);
  } else {
    int left = 1;
    while (2 * left < ranks) left *= 2;
    float right_sum[kBlock];
    tree_sum<T>(group, offset, n, first, left, sum);
    tree_sum<T>(group, offset, n, first + left, ranks - left, right_sum);
    for (int i = 0; i < n; ++i) sum[i] += right_sum[i];
  }
}

// out[0..n) = the sum over all ranks of what lies `offset` bytes into their staging areas.
template <class T> void reduce(const Group& group, size_t offset, size_t n, T* out) {
  float sum[kBlock];
  for (size_t i = 0; i < n; i += kBlock) {
    const int m = int(std::min<size_t>(kBlock, n - i));
    tree_sum<T>(group, offset + i * sizeof(T), m, 0, group.world, sum);
    for (int j = 0; j < m; ++j) out[i + j] = from_float<T>(sum[j]);
  }
}

// Calls body(first, n) for consecutive pieces of `count` elements, at least once, until one fails.
template <class Body> int in_pieces(size_t count, size_t most, Body body) {
  size_t first = 0;
  do {
    const size_t n = std::min(most, count - first);
    if (int code = body(first, n)) return code;
    first += n;
  } while (first < count);
  return kOk;
}

template <class T> int all_reduce(Communicator& comm, const Call& call, const T* x, T* out) {
  return in_pieces(call.count, comm.staging_bytes / sizeof(T), [&](size_t first, size_t n) {
    return comm.exchange(call, [&](char* staging) { std::memcpy(staging, x + first, n * sizeof(T)); },
                         [&] { reduce(comm.group, 0, n, out + first); });
  });
}

template <class T> int reduce_scatter(Communicator& comm, const Call& call, const T* x, T* out) {
  const Group& group = comm.group;
  const size_t part = call.count / group.world, room = comm.staging_bytes / group.world / sizeof(T);
  return in_pieces(part, room, [&](size_t first, size_t n) {
    const auto stage = [&](char* staging) {
      for (int rank = 0; rank < group.world; ++rank)
        std::memcpy(staging + rank * room * sizeof(T), x + rank * part + first, n * sizeof(T));
    };
    return comm.exchange(call, stage, [&] { reduce(group, group.rank * room * sizeof(T), n, out + first); });
  });
}

int all_gather(Communicator& comm, const Call& call, size_t bytes, const char* x, char* out) {
  const Group& group = comm.group;
  return in_pieces(bytes, comm.staging_bytes, [&](size_t first, size_t n) {
    const auto read = [&] {
      for (int rank = 0; rank < group.world; ++rank) {
        char* to = out + rank * bytes + first;
        if (to != x + first) std::memcpy(to, group.staging[rank], n);  // x may be this rank's own slice of out
      }
    };
    return comm.exchange(call, [&](char* staging) { std::memcpy(staging, x + first, n); }, read);
  });
}

// Only sums over ranks serve FP16. The codes are those of DTYPES in rlk/collectives/shm.py.
template <class Fn> int with_sum_dtype(int dtype, Fn fn) {
  return dtype == kFloat16 ? fn(half{}) : with_dtype(dtype, fn);
}

}  // namespace
}  // namespace rlk

// Makes a communicator over the mapped segments of all ranks (zeroed by their owners before anybody connects).
RLK_EXPORT int rlk_shm_create(char* const* segments, int rank, int world, int64_t staging_bytes, int64_t timeout_ns,
                              void** handle) {
  using namespace rlk;
  if (world < 1 || world > kMaxRanks || rank < 0 || rank >= world || staging_bytes < 64 * world) return kBadShape;
  auto* comm = new (std::nothrow) Communicator{{}, {}, size_t(staging_bytes)};
  if (!comm) return kNoMemory;
  for (int r = 0; r < world; ++r) {
    comm->group.control[r] = reinterpret_cast<Control*>(segments[r]);
    comm->group.staging[r] = segments[r] + kStagingOffset;
  }
  comm->group.rank = rank;
  comm->group.world = world;
  comm->group.timeout_ns = uint64_t(timeout_ns);
  *handle = comm;
  return kOk;
}

// One collective. x has `count` elements of `itemsize` bytes; sums take dtypes 0..2, all_gather any. kTimeout: see
// rlk_shm_failure; the communicator is then of no more use.
RLK_EXPORT int rlk_shm_call(void* handle, int operation, int dtype, int itemsize, const void* x, void* out,
                            int64_t count) {
  using namespace rlk;
  auto& comm = *static_cast<Communicator*>(handle);
  const Call call{operation, dtype, uint64_t(count), kNoSlot, 0};
  if (operation == kAllGather)
    return all_gather(comm, call, size_t(count) * itemsize, static_cast<const char*>(x), static_cast<char*>(out));
  if (operation == kBarrier) return comm.exchange(call, [](char*) {}, [] {});
  return with_sum_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = operation == kAllReduce ? all_reduce<T> : reduce_scatter<T>;
    return run(comm, call, static_cast<const T*>(x), static_cast<T*>(out));
  });
}

RLK_EXPORT int rlk_shm_failure(void* handle, rlk::Failure* failure) {
  *failure = static_cast<rlk::Communicator*>(handle)->failure;
  return rlk::kOk;
}

// Tells the peers that this rank makes no more calls, and frees the communicator; the caller unmaps the segments.
RLK_EXPORT int rlk_shm_close(void* handle) {
  auto* comm = static_cast<rlk::Communicator*>(handle);
  rlk::publish_closed(comm->memory, *comm->group.control[comm->group.rank]);
  delete comm;
  return rlk::kOk;
}
