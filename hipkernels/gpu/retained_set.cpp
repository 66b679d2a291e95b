// Log-prob and entropy over retained sets (ops/logprob.py has the rule; cpu/logprob.cpp is the same on the host).
//
// Layout: retained sets are CSR: the entries of row r are offsets[r] .. offsets[r+1]-1 of `ids` (int32, ascending) and
// of `values` (FP32, their unscaled logits); offsets are int64 and may start above 0. Logits and their gradients are
// [rows, columns], row-major; column j of this rank is id first_id + j.
//
// Roles: one workgroup of 256 lanes takes one row, of any size; in find_targets one lane takes one row.
//
// Reduction order: a row's STATE is (max, sum e, sum e*x), with x = logit * inv_t in FP32 and e = exp(x - max). Element
// i of the row goes to partial i % 256, i ascending (e by an add, e*x by an FMA); the partials are combined by the tree
// 128, 64, .. 1: partial[l] += partial[l + half]. Lane l owns partial l, so neither the wave's width nor the order in
// which waves run can show in the bits: halves that span waves meet in LDS, the others in shuffles of the first wave.
// Then lse = max + log(sum), logprob = x[target] - lse, entropy = lse - (sum e*x) / sum, in lane 0.
#include "gpu/gpu.h"
#include "score.h"

namespace rlk {
namespace {

constexpr int kLanes = 256;
constexpr int kAtOnce = 4;  // entries whose ids, and then logits, one lane of pick_logits has under way together
constexpr int64_t kMostRows = int64_t(1) << 23;  // a HIP grid holds fewer than 2**32 lanes

struct Row {
  int64_t begin, end;
};
RLK_DEVICE inline Row row_of(const int64_t* offsets, int64_t r) { return {offsets[r], offsets[r + 1]}; }

// The tree over the lanes' values; the result is in lane 0. Every lane of the workgroup must call it, and nobody may
// still use `room` (one value per lane).
template <class T, class Combine> RLK_DEVICE inline T reduce(T mine, T* room, Combine combine) {
  const int lane = lane_index();
  for (int half = kLanes / 2; half >= kWave; half /= 2) {
    if (lane < 2 * half) room[lane] = mine;  // what the level above may still be reading lies beyond
    __syncthreads();
    if (lane < half) mine = combine(mine, room[lane + half]);
  }
  if (lane < kWave)
    for (int half = kWave / 2; half > 0; half /= 2) mine = combine(mine, shuffle_down(mine, half));
  return mine;
}

struct Sums {
  float sum, weighted;
};

struct RowScratch {
  Sums room[kLanes];
  float tops[kLanes];
  float max;
};

// The state of a row, in lane 0.
RLK_DEVICE inline State state_of(const float* values, Row row, float inv_t, RowScratch& scratch) {
  const int lane = lane_index();
  float top = kNegInf;  // NaN is passed over
  for (int64_t i = row.begin + lane; i < row.end; i += kLanes) {
    const float x = scaled(values[i], inv_t);
    top = x > top ? x : top;
  }
  top = reduce(top, scratch.tops, [](float a, float b) { return b > a ? b : a; });
  if (lane == 0) scratch.max = top;
  __syncthreads();
  const float max = scratch.max;
  const float shift = max == kNegInf ? 0.0f : max;  // a row without a finite logit: every e is zero, not exp(NaN)
  Sums sums = {0.0f, 0.0f};
  for (int64_t i = row.begin + lane; i < row.end; i += kLanes) {
    const float x = scaled(values[i], inv_t), e = exp_f32(x - shift);
    sums.sum += e;
    sums.weighted = __builtin_fmaf(e, x == kNegInf ? 0.0f : x, sums.weighted);
  }
  sums = reduce(sums, scratch.room, [](Sums a, Sums b) { return Sums{a.sum + b.sum, a.weighted + b.weighted}; });
  return {max, sums.sum, sums.weighted};
}

// Zeroes for `count` elements of T, 128 bits at a time between the first and the last address that allow it.
template <class T> RLK_DEVICE inline void clear(T* out, int64_t count) {
  constexpr int64_t kPerVector = 16 / sizeof(T);
  int64_t head = int64_t((16 - reinterpret_cast<uintptr_t>(out) % 16) % 16 / sizeof(T));
  head = head < count ? head : count;
  const int64_t vectors = (count - head) / kPerVector, tail = head + vectors * kPerVector;
  const int lane = lane_index();
  if (lane < head) out[lane] = T{};
  for (int64_t i = lane; i < vectors; i += kLanes) store16(out + head + i * kPerVector, Vector16{});
  if (lane < count - tail) out[tail + lane] = T{};
}

}  // namespace

extern "C" __global__ void RLK_LANES(kLanes)
    find_targets(const int64_t* offsets, const int32_t* ids, const int64_t* targets, int64_t rows, int64_t* index) {
  const int64_t r = int64_t(group_index()) * kLanes + lane_index();
  if (r >= rows) return;
  const Row row = row_of(offsets, r);
  const int64_t target = targets[r];
  int64_t low = row.begin, high = row.end;  // the first entry that is not below the target lies in [low, high]
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const bool below = ids[middle] < target;
    low = below ? middle + 1 : low;
    high = below ? high : middle;
  }
  index[r] = low < row.end && ids[low] == target ? low : -1;
}

extern "C" __global__ void RLK_LANES(kLanes)
    pick_logits(const float* logits, int64_t columns, const int64_t* offsets, const int32_t* ids, int64_t first_id,
                float* values) {
  const int64_t r = group_index();
  const Row row = row_of(offsets, r);
  const float* mine = logits + r * columns;
  const auto pick = [=](int64_t column) { return column >= 0 && column < columns ? mine[column] + 0.0f : 0.0f; };
  int64_t i = row.begin + lane_index();
  for (; i + (kAtOnce - 1) * kLanes < row.end; i += kAtOnce * kLanes) {
    int64_t column[kAtOnce];
    float value[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k) column[k] = ids[i + k * kLanes] - first_id;
    for (int k = 0; k < kAtOnce; ++k) value[k] = pick(column[k]);
    for (int k = 0; k < kAtOnce; ++k) values[i + k * kLanes] = value[k];
  }
  for (; i < row.end; i += kLanes) values[i] = pick(ids[i] - first_id);
}

extern "C" __global__ void RLK_LANES(kLanes)
    support_score(const float* values, const int64_t* offsets, const int64_t* target_index, int64_t rows, float inv_t,
                  float* scores) {
  RLK_SHARED(RowScratch, scratch);
  const int64_t r = group_index();
  const State all = state_of(values, row_of(offsets, r), inv_t, scratch);
  if (lane_index() != 0) return;
  const int64_t target = target_index[r];
  store(scores, rows, r, finish(all, target < 0 ? kInf - kInf : values[target], inv_t));
}

template <class T>
__global__ void RLK_LANES(kLanes)
    support_score_backward(const float* values, const int64_t* offsets, const int32_t* ids, const int64_t* target_index,
                           const float* lse, const float* grad, int64_t columns, int64_t first_id, float inv_t,
                           T* dlogits) {
  const int64_t r = group_index(), target = target_index[r];
  const Row row = row_of(offsets, r);
  const float row_lse = lse[r], scale = grad[r] * inv_t;
  T* out = dlogits + r * columns;
  clear(out, columns);
  __syncthreads();  // the zero of a column comes from another lane than its gradient
  for (int64_t i = row.begin + lane_index(); i < row.end; i += kLanes) {
    const int64_t column = ids[i] - first_id;
    if (column < 0 || column >= columns) continue;
    const float p = exp_f32(scaled(values[i], inv_t) - row_lse);
    out[column] = from_float<T>((i == target ? scale : 0.0f) - scale * p);
  }
}

}  // namespace rlk

using namespace rlk;

// index[r] = the entry of row r whose id is targets[r], or -1.
RLK_EXPORT int rlk_gpu_find_targets(const int64_t* offsets, const int32_t* ids, const int64_t* targets, int64_t rows,
                                    int64_t* index, void* stream) {
  if (rows < 0 || rows > kMostRows) return kBadShape;
  if (rows == 0) return kOk;
  return RLK_LAUNCH(find_targets, (rows + kLanes - 1) / kLanes, kLanes, stream, offsets, ids, targets, rows, index);
}

// values[n] = the logit of entry n, +0 where another rank owns it; entries offsets[0] to offsets[rows].
RLK_EXPORT int rlk_gpu_pick_logits(const float* logits, int64_t rows, int64_t columns, const int64_t* offsets,
                                   const int32_t* ids, int64_t first_id, float* values, void* stream) {
  if (rows < 0 || rows > kMostRows) return kBadShape;
  if (rows == 0) return kOk;
  return RLK_LAUNCH(pick_logits, rows, kLanes, stream, logits, columns, offsets, ids, first_id, values);
}

// scores is [3, rows]: logprob, entropy, lse. target_index[r] is the target's entry; -1 makes the log-prob NaN.
RLK_EXPORT int rlk_gpu_support_score(const float* values, const int64_t* offsets, const int64_t* target_index,
                                     int64_t rows, float inv_t, float* scores, void* stream) {
  if (rows < 0 || rows > kMostRows) return kBadShape;
  if (rows == 0) return kOk;
  return RLK_LAUNCH(support_score, rows, kLanes, stream, values, offsets, target_index, rows, inv_t, scores);
}

// dlogits = grad * inv_t * (1[id = target] - exp(x - lse)) on each row's retained set, 0 for every other id.
RLK_EXPORT int rlk_gpu_support_score_backward(const float* values, const int64_t* offsets, const int32_t* ids,
                                              const int64_t* target_index, const float* lse, const float* grad,
                                              int64_t rows, int64_t columns, int64_t first_id, float inv_t, int dtype,
                                              void* dlogits, void* stream) {
  if (rows < 0 || rows > kMostRows) return kBadShape;
  if (dtype != kFloat32 && dtype != kBfloat16) return kBadDtype;
  if (rows == 0) return kOk;
  if (dtype == kFloat32)
    return RLK_LAUNCH(support_score_backward<float>, rows, kLanes, stream, values, offsets, ids, target_index, lse,
                      grad, columns, first_id, inv_t, static_cast<float*>(dlogits));
  return RLK_LAUNCH(support_score_backward<bf16>, rows, kLanes, stream, values, offsets, ids, target_index, lse,
                    grad, columns, first_id, inv_t, static_cast<bf16*>(dlogits));
}
