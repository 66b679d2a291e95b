// Log-prob and entropy over the vocabulary or over a retained set (ops/logprob.py has the rule).
//
// Layout: logits [rows, columns] FP32, row-major; column j of this rank is id first_id + j. Retained sets are CSR: the
// entries of row r are offsets[r] .. offsets[r+1]-1 of `ids` (ascending) and `values` (their unscaled logits).
//
// Reduction order. The unit is a STATE (max, sum e, sum e*x) over a run of logits, with x = logit * inv_t in FP32 and
// e = exp(x - max): element i of the run goes to partial sum i % 16 (e by an add, e*x by an FMA), the partials are
// combined by the tree 8, 4, 2, 1. A run is one vocabulary tile, or one row's whole retained set. Tiles are merged with
// scale_i = exp(max_i - max), sum = fma(sum_i, scale_i, sum) for i ascending from 0. Then
//     lse = max + log(sum),  logprob = x[target] - lse,  entropy = lse - (sum e*x) / sum.
// Threads split rows only.
#include <algorithm>

#include "cpu/logits.h"

namespace rlk {
namespace {

constexpr long kMaxTiles = 64;
constexpr long kParallelWork = 1 << 14;  // elements below which a second thread costs more than it saves

inline float tree_sum(float* lane) {
  for (long half = kPartials / 2; half > 0; half /= 2)
    for (long l = 0; l < half; ++l) lane[l] += lane[l + half];
  return lane[0];
}

State state_of(const float* logits, long count, float inv_t) {
  const float max = max_of(logits, count, inv_t);
  const float shift = max == kNegInf ? 0.0f : max;  // a run without a finite logit: every e is zero, not exp(NaN)
  float sum[kPartials] = {}, weighted[kPartials] = {};
  for_blocks(logits, count, [&](const float* block) {
    for (long l = 0; l < kPartials; ++l) {
      const float x = scaled(block[l], inv_t), e = exp_f32(x - shift);
      sum[l] += e;
      weighted[l] = __builtin_fmaf(e, x == kNegInf ? 0.0f : x, weighted[l]);
    }
  });
  return {max, tree_sum(sum), tree_sum(weighted)};
}

Score merge(const State* tiles, long count, float target_logit, float inv_t) {
  State all = {kNegInf, 0.0f, 0.0f};
  for (long i = 0; i < count; ++i) all.max = tiles[i].max > all.max ? tiles[i].max : all.max;
  float scale[kMaxTiles];
  for (long i = 0; i < count; ++i) scale[i] = exp_f32(tiles[i].max - all.max);
  for (long i = 0; i < count; ++i) {
    all.sum = __builtin_fmaf(tiles[i].sum, scale[i], all.sum);
    all.weighted = __builtin_fmaf(tiles[i].weighted, scale[i], all.weighted);
  }
  return finish(all, target_logit, inv_t);
}

// out = -scale * exp(x - lse), by value, so that stores to `out` cannot alias what is read.
template <class T>
void backward_row(const float* __restrict logits, long count, float inv_t, float scale, float lse, T* __restrict out) {
  for (long j = 0; j < count; ++j) out[j] = from_float<T>(-scale * exp_f32(scaled(logits[j], inv_t) - lse));
}

}  // namespace
}  // namespace rlk

using namespace rlk;

// index[r] = the entry of row r whose id is targets[r], or -1.
RLK_EXPORT int rlk_find_targets(const int64_t* offsets, const int32_t* ids, const int64_t* targets, int64_t rows,
                                int64_t* index) {
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t *end = ids + offsets[r + 1], *found = std::lower_bound(ids + offsets[r], end, targets[r]);
    index[r] = found != end && *found == targets[r] ? found - ids : -1;
  }
  return kOk;
}

// values[n] = the logit of entry n, +0 where another rank owns it.
RLK_EXPORT int rlk_pick_logits(const float* logits, int64_t rows, int64_t columns, const int64_t* offsets,
                               const int32_t* ids, int64_t first_id, float* values) {
#pragma omp parallel for schedule(static) if (offsets[rows] - offsets[0] > kParallelWork)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = offsets[r]; n < offsets[r + 1]; ++n) {
      const int64_t column = ids[n] - first_id;
      values[n] = column >= 0 && column < columns ? logits[r * columns + column] + 0.0f : 0.0f;
    }
  return kOk;
}

// stats is [rows, tiles] of State.
RLK_EXPORT int rlk_tile_stats(const float* logits, int64_t rows, int64_t columns, int64_t tiles, int64_t first_id,
                              int64_t valid_vocab, float inv_t, State* stats) {
  if (tiles < 1 || columns % tiles) return kBadShape;
  const int64_t width = columns / tiles, valid = std::clamp<int64_t>(valid_vocab - first_id, 0, columns);
#pragma omp parallel for schedule(static) if (rows * columns > kParallelWork)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < tiles; ++i)
      stats[r * tiles + i] =
          state_of(logits + r * columns + i * width, std::clamp<int64_t>(valid - i * width, 0, width), inv_t);
  return kOk;
}

RLK_EXPORT int rlk_merge_tiles(const State* stats, int64_t rows, int64_t tiles, const float* target_logits,
                               float inv_t, float* scores) {
  if (tiles < 1 || tiles > kMaxTiles) return kBadShape;
#pragma omp parallel for schedule(static) if (rows * tiles > kParallelWork)
  for (int64_t r = 0; r < rows; ++r)
    store(scores, rows, r, merge(stats + r * tiles, tiles, target_logits[r], inv_t));
  return kOk;
}

RLK_EXPORT int rlk_support_score(const float* values, const int64_t* offsets, const int64_t* target_index,
                                 int64_t rows, float inv_t, float* scores) {
#pragma omp parallel for schedule(static) if (offsets[rows] - offsets[0] > kParallelWork)
  for (int64_t r = 0; r < rows; ++r) {
    const State all = state_of(values + offsets[r], offsets[r + 1] - offsets[r], inv_t);
    store(scores, rows, r, finish(all, values[target_index[r]], inv_t));
  }
  return kOk;
}

// dlogits = grad * inv_t * (1[id = target] - exp(x - lse)); 0 for ids >= valid_vocab.
RLK_EXPORT int rlk_tile_stats_backward(const float* logits, int64_t rows, int64_t columns, const int64_t* targets,
                                       const float* lse, const float* grad, int64_t first_id, int64_t valid_vocab,
                                       float inv_t, int dtype, void* dlogits) {
  const int64_t valid = std::clamp<int64_t>(valid_vocab - first_id, 0, columns);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
#pragma omp parallel for schedule(static) if (rows * columns > kParallelWork)
    for (int64_t r = 0; r < rows; ++r) {
      const float scale = grad[r] * inv_t, row_lse = lse[r];
      const float* row = logits + r * columns;
      T* out = static_cast<T*>(dlogits) + r * columns;
      backward_row(row, valid, inv_t, scale, row_lse, out);
      std::fill(out + valid, out + columns, T{});
      const int64_t target = targets[r] - first_id;
      if (target >= 0 && target < valid)
        out[target] = from_float<T>(scale - scale * exp_f32(scaled(row[target], inv_t) - row_lse));
    }
    return kOk;
  });
}

// The same over each row's retained set; 0 for every other id.
RLK_EXPORT int rlk_support_score_backward(const float* values, const int64_t* offsets, const int32_t* ids,
                                          const int64_t* target_index, const float* lse, const float* grad,
                                          int64_t rows, int64_t columns, int64_t first_id, float inv_t, int dtype,
                                          void* dlogits) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
#pragma omp parallel for schedule(static) if (rows * columns > kParallelWork)
    for (int64_t r = 0; r < rows; ++r) {
      const float scale = grad[r] * inv_t;
      T* out = static_cast<T*>(dlogits) + r * columns;
      std::fill(out, out + columns, T{});
      for (int64_t n = offsets[r]; n < offsets[r + 1]; ++n) {
        const int64_t column = ids[n] - first_id;
        if (column < 0 || column >= columns) continue;
        const float p = exp_f32(scaled(values[n], inv_t) - lse[r]);
        out[column] = from_float<T>((n == target_index[r] ? scale : 0.0f) - scale * p);
      }
    }
    return kOk;
  });
}
