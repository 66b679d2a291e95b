// Drawing a token from each row's retained set (ops/sampler.py has the rule; cpu/sampler.cpp is the same on the host).
//
// Layout: retained sets are CSR, as in retained_set.cpp. The noise of row r depends on (seed, uids[r], positions[r])
// and on nothing else.
//
// Roles: one workgroup of 256 lanes takes one row, of any size; lane l takes the l-th of 256 runs of equal length, of
// which the last may be shorter or empty.
//
// Order: weights are e = exp(x - max) in FP32, x = logit * inv_t. In double, each run is summed ascending, and the
// runs' sums are added up ascending to what comes before each run, and to the total. The token is the first whose
// cumulative weight, counted on from what comes before its run, exceeds u * total; where rounding leaves that just
// beyond its run, the last of the run that has a weight. Neither the wave's width nor the waves' order enters.
#include "gpu/gpu.h"
#include "philox.h"
#include "score.h"

namespace rlk {
namespace {

constexpr int kLanes = 256;
constexpr int64_t kMostRows = int64_t(1) << 23;  // a HIP grid holds fewer than 2**32 lanes

struct RowScratch {
  double sum_of_run[kLanes];
  float top[kLanes];
};

}  // namespace

extern "C" __global__ void RLK_LANES(kLanes)
    draw(const float* values, const int64_t* offsets, const int32_t* ids, float inv_t, uint64_t seed,
         const int64_t* uids, const int64_t* positions, int64_t* tokens) {
  RLK_SHARED(RowScratch, scratch);
  const int lane = lane_index();
  const int64_t r = group_index(), row = offsets[r], row_end = offsets[r + 1];
  float top = kNegInf;  // +inf marks a row that holds a NaN or a +inf
  for (int64_t i = row + lane; i < row_end; i += kLanes) {
    const float x = scaled(values[i], inv_t);
    top = !(x < kInf) ? kInf : x > top ? x : top;
  }
  scratch.top[lane] = top;
  __syncthreads();
  float max = kNegInf;
  for (int l = 0; l < kLanes; ++l) max = scratch.top[l] > max ? scratch.top[l] : max;
  if (max == kNegInf || max == kInf) {
    if (lane == 0) tokens[r] = -1;
    return;
  }

  const int64_t length = (row_end - row + kLanes - 1) / kLanes, begin = row + lane * length;
  const int64_t end = begin + length < row_end ? begin + length : row_end;
  double sum = 0.0;
  for (int64_t i = begin; i < end; ++i) sum += exp_f32(scaled(values[i], inv_t) - max);
  scratch.sum_of_run[lane] = sum;
  __syncthreads();
  double before = 0.0, total = 0.0;
  for (int l = 0; l < kLanes; ++l) {
    before = l == lane ? total : before;
    total += scratch.sum_of_run[l];
  }

  // u < 1, so that u * total < total in double: exactly one run holds it.
  const double point = sampling_uniform(seed, uint64_t(uids[r]), uint64_t(positions[r])) * total;
  if (point < before || point >= before + sum) return;
  int64_t chosen = begin;
  double cumulative = before;
  for (int64_t i = begin; i < end; ++i) {
    const float weight = exp_f32(scaled(values[i], inv_t) - max);
    if (weight == 0.0f) continue;
    chosen = i;
    cumulative += weight;
    if (cumulative > point) break;
  }
  tokens[r] = ids[chosen];
}

}  // namespace rlk

using namespace rlk;

// tokens[r] is drawn from the ids of row r; -1 where its logits hold a NaN, a +inf or nothing finite.
RLK_EXPORT int rlk_gpu_draw(const float* values, const int64_t* offsets, const int32_t* ids, int64_t rows, float inv_t,
                            uint64_t seed, const int64_t* uids, const int64_t* positions, int64_t* tokens,
                            void* stream) {
  if (rows < 0 || rows > kMostRows) return kBadShape;
  if (rows == 0) return kOk;
  return RLK_LAUNCH(draw, rows, kLanes, stream, values, offsets, ids, inv_t, seed, uids, positions, tokens);
}
