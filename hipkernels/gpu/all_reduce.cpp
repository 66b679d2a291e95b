// One-shot all-reduce between GPUs of one host, by the generation protocol of collective_protocol.h.
//
// LAYOUT. Segment of a rank, plain device memory that its peers have mapped: kMostGroups Control blocks, then
// kMostGroups slices of `slice_bytes`. Workgroup b of every rank uses Control block b and slice b and nothing else, so
// a workgroup only ever waits for its namesakes on the other ranks. Private to a rank, in its own device memory: one
// Progress per workgroup, the generation that it has finished and why it has failed, if it has.
//
// ROLES. The message is cut into slices; with G workgroups, b takes slices b, b + G, .. one generation each. 256 lanes
// move 128 bits at a time; lane p of the first wave polls peer p, all in parallel. Barriers join the two: what lane p
// has acquired all lanes may read, and what all lanes have staged or read lane 0 publishes.
//
// REDUCTION ORDER. FP32, over ranks, per element: ((0+1)+(2+3))+((4+5)+(6+7)), as in rlk/collectives/tree.py. 16-bit
// inputs are widened first and the root is rounded once. Every rank computes all sums itself from the staged inputs.
//
// FAILURE. A workgroup whose peer is late, has closed, or is in another call records that, closes its Control block, so
// that its namesakes need not time out as well, and takes no further part: later launches return at once.
#include <type_traits>

#include "collective_protocol.h"
#include "gpu/gpu.h"
#include "vector_math.h"

namespace rlk {

constexpr int kMostRanks = 8;
constexpr int kMostGroups = 64;

// The group as one rank sees it; a kernel argument.
struct Ranks {
  char* segment[kMostRanks];
  int32_t rank, world;
  uint64_t slice_bytes, timeout_ns;
};

struct alignas(kCacheLine) Progress {
  uint64_t generation;
  Failure failure;
};

namespace {

constexpr int kLanes = 256;
constexpr int kNobody = -1;

template <class T> RLK_DEVICE constexpr Dtype dtype_of() {
  return sizeof(T) == sizeof(float) ? kFloat32 : std::is_same<T, half>::value ? kFloat16 : kBfloat16;
}

// By selection: arguments indexed by a lane's number would have to lie in memory.
template <int World> RLK_DEVICE inline char* segment_of(const Ranks& ranks, int rank) {
  char* segment = ranks.segment[0];
  RLK_UNROLL
  for (int i = 1; i < World; ++i) segment = i == rank ? ranks.segment[i] : segment;
  return segment;
}
RLK_DEVICE inline Control* control_in(char* segment) { return reinterpret_cast<Control*>(segment) + group_index(); }
RLK_DEVICE inline char* slice_in(char* segment, const Ranks& ranks) {
  return segment + kMostGroups * sizeof(Control) + group_index() * ranks.slice_bytes;
}

// The sum over Count ranks of their elements, in the order above.
template <int Count> struct Tree {
  template <class T> RLK_DEVICE static float sum(const T* terms) {
    return Tree<Count / 2>::sum(terms) + Tree<Count / 2>::sum(terms + Count / 2);
  }
};
template <> struct Tree<1> {
  template <class T> RLK_DEVICE static float sum(const T* terms) { return to_float(terms[0]); }
};

// `count` elements by vectors, then the few that are left one by one.
template <class T, class Vectors, class Elements>
RLK_DEVICE inline void for_slice(uint64_t count, Vectors vectors, Elements elements) {
  constexpr uint64_t kPerVector = sizeof(Vector16) / sizeof(T);
  const uint64_t whole = count - count % kPerVector, lane = lane_index();
  for (uint64_t i = lane * kPerVector; i < whole; i += kLanes * kPerVector) vectors(i);
  if (lane < count - whole) elements(whole + lane);
}

template <class T> RLK_DEVICE inline void stage(const T* x, T* slice, uint64_t count) {
  for_slice<T>(count, [&](uint64_t i) { store16(slice + i, load16(x + i)); }, [&](uint64_t i) { slice[i] = x[i]; });
}

template <int World, class T> RLK_DEVICE inline void sum_slices(const Ranks& ranks, T* out, uint64_t count) {
  constexpr int kPerVector = sizeof(Vector16) / sizeof(T);
  const T* slice[World];
  RLK_UNROLL
  for (int rank = 0; rank < World; ++rank)
    slice[rank] = reinterpret_cast<const T*>(slice_in(ranks.segment[rank], ranks));
  const auto vectors = [&](uint64_t i) {
    Vector16 in[World];
    RLK_UNROLL
    for (int rank = 0; rank < World; ++rank) in[rank] = load16(slice[rank] + i);
    T terms[kPerVector][World], sums[kPerVector];
    RLK_UNROLL
    for (int rank = 0; rank < World; ++rank) {
      T of_rank[kPerVector];
      memcpy(of_rank, &in[rank], sizeof(Vector16));
      RLK_UNROLL
      for (int j = 0; j < kPerVector; ++j) terms[j][rank] = of_rank[j];
    }
    RLK_UNROLL
    for (int j = 0; j < kPerVector; ++j) sums[j] = from_float<T>(Tree<World>::sum(terms[j]));
    Vector16 result;
    memcpy(&result, sums, sizeof(Vector16));
    store16(out + i, result);
  };
  const auto elements = [&](uint64_t i) {
    T terms[World];
    RLK_UNROLL
    for (int rank = 0; rank < World; ++rank) terms[rank] = slice[rank][i];
    out[i] = from_float<T>(Tree<World>::sum(terms));
  };
  for_slice<T>(count, vectors, elements);
}

// Lets lane p do `wait(peer p, failure)` for every peer p. False, in all lanes, when one of them failed; then it is
// recorded. `failed` is kNobody before.
template <int World, class Wait>
RLK_DEVICE inline bool all_peers(const Ranks& ranks, Control& mine, Progress& progress, int& failed, Wait wait) {
  const int lane = lane_index();
  Failure failure = {};
  if (lane < World && lane != ranks.rank)
    if (!wait(Peer{control_in(segment_of<World>(ranks, lane)), lane, ranks.timeout_ns}, &failure)) failed = lane;
  __syncthreads();
  if (failed == kNobody) return true;
  if (failed == lane) progress.failure = failure;
  if (lane == 0) publish_closed(SystemMemory{}, mine);
  return false;
}

}  // namespace

template <class T, int World>
__global__ void RLK_LANES(kLanes)
    all_reduce(Ranks ranks, Progress* of_groups, const T* x, T* out, uint64_t count) {
  RLK_SHARED(int, failed);
  const SystemMemory memory;
  const int lane = lane_index();
  Progress& progress = of_groups[group_index()];
  char* segment = segment_of<World>(ranks, ranks.rank);
  Control& mine = *control_in(segment);
  T* slice = reinterpret_cast<T*>(slice_in(segment, ranks));
  const Call call = {kAllReduce, dtype_of<T>(), count};
  const uint64_t in_slice = ranks.slice_bytes / sizeof(T);
  uint64_t generation = progress.generation, first = group_index() * in_slice;
  if (progress.failure.kind != kNoFailure) return;
  if (lane == 0) failed = kNobody;
  __syncthreads();
  do {  // once at least: an empty message is compared with the peers' calls as well
    ++generation;
    const uint64_t left = count - first, n = left < in_slice ? left : in_slice;
    const auto released = [&](const Peer& peer, Failure* failure) {
      return wait_until_released(memory, peer, generation, failure);
    };
    if (!all_peers<World>(ranks, mine, progress, failed, released)) return;
    stage(x + first, slice, n);
    settle_stores();
    __syncthreads();
    if (lane == 0) publish_ready(memory, mine, generation, call);
    const auto staged = [&](const Peer& peer, Failure* failure) {
      return wait_until_staged(memory, peer, generation, call, failure);
    };
    if (!all_peers<World>(ranks, mine, progress, failed, staged)) return;
    sum_slices<World>(ranks, out + first, n);
    __syncthreads();
    if (lane == 0) publish_done(memory, mine, generation);
    first += group_count() * in_slice;
  } while (first < count);
  if (lane == 0) progress.generation = generation;
}

// One workgroup for each of a rank's: this rank makes no more calls.
extern "C" __global__ void RLK_LANES(kWave) close_segment(Ranks ranks) {
  if (lane_index() == 0) publish_closed(SystemMemory{}, *control_in(segment_of<kMostRanks>(ranks, ranks.rank)));
}

namespace {

template <class T>
int launch_all_reduce(const Ranks& ranks, Progress* progress, const void* x, void* out, int64_t count, void* stream) {
  const auto kernel = ranks.world == 8   ? all_reduce<T, 8>
                      : ranks.world == 4 ? all_reduce<T, 4>
                      : ranks.world == 2 ? all_reduce<T, 2>
                                         : all_reduce<T, 1>;
  const int64_t slices = (count * int64_t(sizeof(T)) - 1) / int64_t(ranks.slice_bytes) + 1;
  const int64_t groups = slices < kMostGroups ? slices : kMostGroups;
  return RLK_LAUNCH(kernel, groups, kLanes, stream, ranks, progress, static_cast<const T*>(x), static_cast<T*>(out),
                    uint64_t(count));
}

bool valid(const Ranks& ranks) {
  const int world = ranks.world;
  return (world == 1 || world == 2 || world == 4 || world == 8) && ranks.rank >= 0 && ranks.rank < world &&
         ranks.slice_bytes > 0 && ranks.slice_bytes % kCacheLine == 0;
}

}  // namespace
}  // namespace rlk

using namespace rlk;

// Bytes of a rank's segment and of its progress; both start as zeroes, before any peer uses them.
RLK_EXPORT int rlk_gpu_collective_bytes(int64_t slice_bytes, int64_t* segment, int64_t* progress) {
  if (slice_bytes <= 0 || slice_bytes % kCacheLine) return kBadShape;
  *segment = kMostGroups * (int64_t(sizeof(Control)) + slice_bytes);
  *progress = kMostGroups * int64_t(sizeof(Progress));
  return kOk;
}

// out = the sum over ranks of `count` elements of x; out may be x. `ranks` is read before this returns. Whether a
// workgroup failed is in `progress`, once the stream is idle.
RLK_EXPORT int rlk_gpu_all_reduce(const Ranks* ranks, Progress* progress, int dtype, const void* x, void* out,
                                  int64_t count, void* stream) {
  if (!valid(*ranks) || count < 0) return kBadShape;
  if (reinterpret_cast<uintptr_t>(x) % 16 || reinterpret_cast<uintptr_t>(out) % 16) return kMisaligned;
  if (dtype == kFloat32) return launch_all_reduce<float>(*ranks, progress, x, out, count, stream);
  if (dtype == kBfloat16) return launch_all_reduce<bf16>(*ranks, progress, x, out, count, stream);
  if (dtype == kFloat16) return launch_all_reduce<half>(*ranks, progress, x, out, count, stream);
  return kBadDtype;
}

// Tells the peers that this rank makes no more calls, in stream order.
RLK_EXPORT int rlk_gpu_close(const Ranks* ranks, void* stream) {
  if (!valid(*ranks)) return kBadShape;
  return RLK_LAUNCH(close_segment, kMostGroups, kWave, stream, *ranks);
}
