// Drawing tokens (ops/sampler.py has the rule).
//
// Layout: logits [rows, columns] FP32; ids >= valid do not exist. A value's KEY is its FP32 bits mapped so that unsigned
// order is numeric order; key << 32 | id orders a row by (value, id). A retained set is everything at or above one such
// pair, its CUT, so that it is found once (rlk_retained_cut), sized, and then written and drawn from (rlk_draw).
//
// Order: sums run in double over ascending (value, id) for the nucleus and over ascending ids for the draw. Threads
// split rows only; a row never looks at another one.
#include <algorithm>
#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/common.h"
#include "philox.h"

namespace rlk {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// -0.0 becomes +0.0: they are equal values, so that only the id may order them.
inline float scaled(float logit, float inv_t) { return (logit + 0.0f) * inv_t; }

inline uint64_t pair_of(float x, uint64_t id) {
  const uint32_t u = bits_of(x);
  return uint64_t(u & 0x80000000u ? ~u : u | 0x80000000u) << 32 | id;
}

inline float value_of(uint64_t pair) {
  const uint32_t key = uint32_t(pair >> 32);
  return float_of(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The largest x of a row; NaN if the row holds a NaN, a +inf or nothing finite.
float row_max(const float* row, long valid, float inv_t) {
  float max = kNegInf;
  int bad = 0;
  for (long i = 0; i < valid; ++i) {
    const float x = scaled(row[i], inv_t);
    bad |= !(x < kInf);
    max = x > max ? x : max;
  }
  return bad || max == kNegInf ? std::numeric_limits<float>::quiet_NaN() : max;
}

// Stable radix sort, ascending by key: four passes of eight bits, so that the result ends in `pairs` again.
void sort_pairs(std::vector<uint64_t>& pairs, std::vector<uint64_t>& scratch) {
  std::array<std::array<uint32_t, 256>, 4> place{};
  for (uint64_t p : pairs)
    for (int pass = 0; pass < 4; ++pass) ++place[pass][p >> (32 + 8 * pass) & 255];
  scratch.resize(pairs.size());
  for (int pass = 0; pass < 4; ++pass) {
    uint32_t next = 0;
    for (uint32_t& start : place[pass]) next += std::exchange(start, next);
    for (uint64_t p : pairs) scratch[place[pass][p >> (32 + 8 * pass) & 255]++] = p;
    pairs.swap(scratch);
  }
}

struct Nucleus {
  float top_p;
  long top_k;
  float min_p;
};

// The lowest retained pair of a row, and the number of pairs retained.
std::pair<uint64_t, long> retained_cut(const float* row, long valid, float inv_t, Nucleus rule,
                                       std::vector<uint64_t>& pairs, std::vector<uint64_t>& scratch) {
  const float max = row_max(row, valid, inv_t);
  if (max != max) return {pair_of(kInf, 0), 0};
  const float lowest = log_f32(rule.min_p);
  pairs.clear();
  for (long id = 0; id < valid; ++id) {
    const float x = scaled(row[id], inv_t);
    if (x - max >= lowest) pairs.push_back(pair_of(x, uint64_t(id)));
  }
  const bool all_p = rule.top_p >= 1.0f;
  if (all_p && rule.top_k == 0) return {*std::min_element(pairs.begin(), pairs.end()), long(pairs.size())};

  sort_pairs(pairs, scratch);
  const long n = long(pairs.size());
  long start = 0;
  if (rule.top_k > 0 && rule.top_k < n) {
    start = n - rule.top_k;
    while (start > 0 && value_of(pairs[start - 1]) == value_of(pairs[start])) --start;
  }
  if (!all_p) {
    double total = 0.0, cumulative = 0.0;
    for (long i = start; i < n; ++i) total += exp_f32(value_of(pairs[i]) - max);
    const float norm = float(total), drop_up_to = 1.0f - rule.top_p;
    for (; start < n - 1; ++start) {
      cumulative += exp_f32(value_of(pairs[start]) - max) / norm;
      if (float(cumulative) > drop_up_to) break;
    }
  }
  return {pairs[start], n - start};
}

}  // namespace
}  // namespace rlk

using namespace rlk;

// tokens[r] = the lowest id of row r's largest logit; -1 for a row without one (see row_max).
RLK_EXPORT int rlk_argmax(const float* logits, int64_t rows, int64_t columns, int64_t valid, int64_t* tokens) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const float *row = logits + r * columns, max = row_max(row, valid, 1.0f);
    tokens[r] = max == max ? std::find(row, row + valid, max) - row : -1;
  }
  return kOk;
}

// cuts[r], counts[r] = the cut and the size of row r's retained set; nothing is retained of a bad row (see row_max).
RLK_EXPORT int rlk_retained_cut(const float* logits, int64_t rows, int64_t columns, int64_t valid, float inv_t,
                                float top_p, int64_t top_k, float min_p, uint64_t* cuts, int64_t* counts) {
#pragma omp parallel
  {
    std::vector<uint64_t> pairs, scratch;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
      std::tie(cuts[r], counts[r]) =
          retained_cut(logits + r * columns, valid, inv_t, {top_p, top_k, min_p}, pairs, scratch);
  }
  return kOk;
}

// Draws tokens[r] from the retained set of row r, and writes the set to ids[offsets[r]..]; with cuts == nullptr the set
// is the whole vocabulary and is not written. Inverse CDF: the first id whose cumulative weight, weights exp(x - max)
// in FP32 summed in double, exceeds u times the total. -1 for a bad row (see row_max).
RLK_EXPORT int rlk_draw(const float* logits, int64_t rows, int64_t columns, int64_t valid, float inv_t, uint64_t seed,
                        const int64_t* uids, const int64_t* positions, const uint64_t* cuts, const int64_t* offsets,
                        int32_t* ids, int64_t* tokens) {
#pragma omp parallel
  {
    std::vector<float> weights;
    std::vector<int32_t> retained;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const float *row = logits + r * columns, max = row_max(row, valid, inv_t);
      tokens[r] = -1;
      if (max != max) continue;
      const uint64_t cut = cuts ? cuts[r] : 0;
      retained.clear();
      for (int64_t id = 0; id < valid; ++id)
        if (pair_of(scaled(row[id], inv_t), uint64_t(id)) >= cut) retained.push_back(int32_t(id));
      if (ids) std::copy(retained.begin(), retained.end(), ids + offsets[r]);

      const int64_t n = int64_t(retained.size());
      weights.resize(n);
      for (int64_t i = 0; i < n; ++i) weights[i] = exp_f32(scaled(row[retained[i]], inv_t) - max);
      double total = 0.0, cumulative = 0.0;
      for (int64_t i = 0; i < n; ++i) total += weights[i];
      const double wanted = sampling_uniform(seed, uids[r], positions[r]) * total;
      int64_t i = 0;
      while ((cumulative += weights[i]) <= wanted) ++i;
      tokens[r] = retained[i];
    }
  }
  return kOk;
}
