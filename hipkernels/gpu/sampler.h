// What the sampler's kernels share (ops/sampler.py has the rule; cpu/sampler.cpp is the same on the host).
//
// Layout: logits [rows, columns] FP32; ids >= valid do not exist. A row is cut into SEGMENTS of 4096 ids, and a
// workgroup of 256 lanes takes one segment of one row: lane l holds the ids 1024 * v + 4 * l + j of it (v and j from 0
// to 3), so that a quad is one 128-bit load. The cut depends on ids alone, never on the number of rows.
//
// A value's KEY is its FP32 bits mapped so that unsigned order is numeric order; the PAIR key << 32 | id orders a row by
// (value, id). What min-p, top-k and top-p keep is always everything at or above one pair.
//
// Order: none that could show. Counts and weights are added as integers, weights and probabilities in fixed point (so
// that atomics are exact), but for the normaliser of top-p: a sum in double, in one tree (sampler_select.cpp).
#pragma once
#include "gpu/gpu.h"
#include "score.h"

namespace rlk::sampler {

constexpr int kLanes = 256;
constexpr int kQuads = 4;                              // of a lane
constexpr int kSegment = kLanes * 4 * kQuads;          // ids
constexpr int kMostSegments = 64;                      // so 262144 ids
constexpr int64_t kMostGroups = int64_t(1) << 23;      // a HIP grid holds fewer than 2**32 lanes
constexpr int kBins = 2048, kBinsPerUnit = 64;         // a bin is 1/64 wide in max - x; the last takes the rest
constexpr int kProbabilityBits = 62, kWeightBits = 44; // of the fixed point; 2**18 weights of 1 fit into 64 bits

// How one row is sampled. rlk/ops/gpu_sampler.py writes these.
struct RowRule {
  float inv_t;
  float min_p;          // 0: off
  int64_t top_k;        // 0: off
  uint64_t drop_limit;  // top-p drops while the probability so far, times 2**62, is at most this; 0: off
  uint64_t seed;
};

enum Stage : int { kTopK = 0, kTopP = 1 };

// Where the cut of a stage lies: in `bin`, with `before` below that bin, and passed by the first sum above `limit`.
struct Crossing {
  uint64_t before, limit;
  int32_t bin;  // -1: nothing is cut
  uint32_t candidates;
};

// One row's workspace.
struct RowState {
  float top[kMostSegments];         // a segment's largest x; +inf if it holds a NaN or a +inf
  double sum[kMostSegments];        // a segment's weights, of what min-p and top-k keep
  uint32_t kept[kMostSegments];     // entries of the retained set
  uint64_t weight[kMostSegments];   // their weights, times 2**44
  uint32_t retained;                // entries of the row
  uint64_t cut[2];                  // per stage: the lowest pair that it keeps
  Crossing crossing[2];
  uint64_t histogram[2][kBins];     // per stage, by bin: how many (top-k), or how probable (top-p)
};

RLK_DEVICE inline uint64_t pair_of(float x, uint32_t id) {
  const uint32_t u = bits_of(x), key = u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
  return uint64_t(key) << 32 | id;
}
RLK_DEVICE inline float value_of(uint64_t pair) {
  const uint32_t key = uint32_t(pair >> 32);
  return float_of(key ^ (uint32_t(int32_t(~key) >> 31) | 0x80000000u));
}

// x * 2**bits for x from 0 to 1, rounded down; a denormal counts as nothing.
RLK_DEVICE inline uint64_t fixed_point(float x, int bits) {
  const uint32_t u = bits_of(x);
  const uint64_t mantissa = u < 0x800000u ? 0 : (u & 0x7fffffu) | 0x800000u;
  const int shift = int(u >> 23) - 150 + bits;
  return shift >= 0 ? mantissa << shift : shift > -24 ? mantissa >> -shift : 0;
}

// The bin of x by its distance from the largest; falls with x, so that bins are runs of the sorted row.
RLK_DEVICE inline int bin_of(float x, float max) {
  const float place = (max - x) * float(kBinsPerUnit);
  return place < float(kBins - 1) ? int(place) : kBins - 1;
}

#if defined(RLK_HOST_FIBERS)
inline void add_shared(uint64_t* sum, uint64_t x) { *sum += x; }
inline void add_shared(uint32_t* sum, uint32_t x) { *sum += x; }
inline void add_global(uint64_t* sum, uint64_t x) { *sum += x; }
inline uint32_t add_global(uint32_t* sum, uint32_t x) { return (*sum += x) - x; }
#elif defined(__HIP__)
__device__ inline void add_shared(uint64_t* sum, uint64_t x) {
  __hip_atomic_fetch_add(sum, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ inline void add_shared(uint32_t* sum, uint32_t x) {
  __hip_atomic_fetch_add(sum, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ inline void add_global(uint64_t* sum, uint64_t x) {
  __hip_atomic_fetch_add(sum, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ inline uint32_t add_global(uint32_t* sum, uint32_t x) {
  return __hip_atomic_fetch_add(sum, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
#else
// Two words with a carry: sm_90 has no 64-bit add in shared memory, and would spin on a compare-and-swap.
__device__ inline void add_shared(uint64_t* sum, uint64_t x) {
  uint32_t* word = reinterpret_cast<uint32_t*>(sum);
  const uint32_t low = uint32_t(x), old = atomicAdd(word, low);
  const uint32_t high = uint32_t(x >> 32) + (old + low < old ? 1u : 0u);
  if (high) atomicAdd(word + 1, high);
}
__device__ inline void add_shared(uint32_t* sum, uint32_t x) { atomicAdd(sum, x); }
__device__ inline void add_global(uint64_t* sum, uint64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(x));
}
__device__ inline uint32_t add_global(uint32_t* sum, uint32_t x) { return atomicAdd(sum, x); }
#endif

// ---- over the lanes of a workgroup; every lane must call these ----

template <class T, class Combine> RLK_DEVICE inline T reduce_wave(T mine, Combine combine) {
  RLK_UNROLL
  for (int lanes = kWave / 2; lanes > 0; lanes /= 2) mine = combine(mine, shuffle_xor(mine, lanes));
  return mine;
}

template <class T> struct WaveRoom {
  T wave[kLanes / kWave];
};

// For operations whose order does not show; every lane gets the result.
template <class T, class Combine> RLK_DEVICE inline T reduce_group(T mine, WaveRoom<T>& room, Combine combine) {
  mine = reduce_wave(mine, combine);
  __syncthreads();  // an earlier use of the room has ended
  if (lane_index() % kWave == 0) room.wave[lane_index() / kWave] = mine;
  __syncthreads();
  mine = room.wave[0];
  for (int w = 1; w < kLanes / kWave; ++w) mine = combine(mine, room.wave[w]);
  return mine;
}

template <class T> struct Prefix {
  T before, total;
};

// The sum of integers over the lanes below, and over all.
template <class T> RLK_DEVICE inline Prefix<T> prefix_group(T mine, WaveRoom<T>& room) {
  const int lane = lane_index() % kWave, own_wave = lane_index() / kWave;
  T from_here = mine;  // over this lane and those above it in the wave
  RLK_UNROLL
  for (int lanes = 1; lanes < kWave; lanes *= 2) {
    const T above = shuffle_down(from_here, lanes);
    from_here += lane + lanes < kWave ? above : T(0);
  }
  __syncthreads();
  if (lane == 0) room.wave[own_wave] = from_here;
  __syncthreads();
  T before = room.wave[own_wave] - from_here, total = 0;
  for (int w = 0; w < kLanes / kWave; ++w) {
    before += w < own_wave ? room.wave[w] : T(0);
    total += room.wave[w];
  }
  return {before, total};
}

// ---- a row, and this workgroup's segment of it ----

struct Place {
  int row, segment;
};
RLK_DEVICE inline Place place_of(int segments) { return {group_index() / segments, group_index() % segments}; }

// Largest x of the row, in every lane: -inf or +inf for a row that cannot be sampled.
RLK_DEVICE inline float row_top(const RowState& state, int segments) {
  float top = kNegInf;
  for (int s = lane_index() % kWave; s < segments; s += kWave) top = state.top[s] > top ? state.top[s] : top;
  return reduce_wave(top, [](float a, float b) { return b > a ? b : a; });
}
RLK_DEVICE inline bool sampled(float top) { return top > kNegInf && top < kInf; }

// What one row keeps, as far as its stages are done.
struct Kept {
  float inv_t, top, lowest;
  uint64_t cut;  // the higher of both stages'

  RLK_DEVICE bool has(float x, uint32_t id) const { return x - top >= lowest && pair_of(x, id) >= cut; }
};
RLK_DEVICE inline Kept kept_of(const RowRule& rule, const RowState& state, float top) {
  const uint64_t k = state.cut[kTopK], p = state.cut[kTopP];
  return {rule.inv_t, top, log_f32(rule.min_p), k > p ? k : p};
}

// top-p's normaliser: the segments' sums, ascending.
RLK_DEVICE inline float norm_of(const RowState& state, int segments) {
  double total = 0.0;
  for (int s = 0; s < segments; ++s) total += state.sum[s];
  return float(total);
}
RLK_DEVICE inline uint64_t probability(float x, float top, float norm) {
  return fixed_point(exp_f32(x - top) / norm, kProbabilityBits);
}

// The lane's 16 logits of a segment; -inf where there is no id.
struct Logits {
  float quad[kQuads][4];
};
RLK_DEVICE inline uint32_t id_at(int segment, int v, int j) {
  return uint32_t(segment) * kSegment + uint32_t(v) * (kLanes * 4) + uint32_t(lane_index()) * 4 + uint32_t(j);
}
RLK_DEVICE inline Logits load_segment(const float* logits, int64_t columns, int valid, Place place) {
  const float* row = logits + place.row * columns;
  const bool aligned = columns % 4 == 0 && reinterpret_cast<uintptr_t>(logits) % 16 == 0;
  Logits mine;
  RLK_UNROLL
  for (int v = 0; v < kQuads; ++v) {
    const uint32_t first = id_at(place.segment, v, 0);
    if (aligned && first + 4 <= uint32_t(valid)) {
      const Vector16 four = load16(row + first);
      RLK_UNROLL
      for (int j = 0; j < 4; ++j) mine.quad[v][j] = float_of(four.word[j]);
    } else {
      RLK_UNROLL
      for (int j = 0; j < 4; ++j) mine.quad[v][j] = first + j < uint32_t(valid) ? row[first + j] : kNegInf;
    }
  }
  return mine;
}

// Calls fn(v, j, id, logit, x) for every id that the lane holds.
template <class Fn>
RLK_DEVICE inline void for_ids(const Logits& mine, int valid, int segment, float inv_t, Fn fn) {
  RLK_UNROLL
  for (int v = 0; v < kQuads; ++v) {
    RLK_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t id = id_at(segment, v, j);
      if (id < uint32_t(valid)) fn(v, j, id, mine.quad[v][j], scaled(mine.quad[v][j], inv_t));
    }
  }
}

inline int segments_of(int64_t valid) { return int((valid + kSegment - 1) / kSegment); }
inline bool fits(int64_t rows, int64_t columns, int64_t valid) {
  return rows >= 0 && valid > 0 && valid <= columns && valid <= int64_t(kSegment) * kMostSegments &&
         rows <= kMostGroups / kMostSegments;
}

}  // namespace rlk::sampler
