// Drawing tokens (ops/sampler.py has the rule).
//
// Layout: logits [rows, columns] FP32; ids >= valid do not exist. A value's KEY is its FP32 bits mapped so that
// unsigned order is numeric order; the PAIR key << 32 | id orders a row by (value, id). A retained set is everything at
// or above one pair, its CUT: so it is found once (rlk_retained_cut), sized, and then written and drawn from (rlk_draw).
//
// Order: sums run in double over ascending pairs for the nucleus and over ascending ids for the draw. Threads split
// rows only; a row never looks at another one.
#include <algorithm>
#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/logits.h"
#include "philox.h"

namespace rlk {
namespace {

// Without branches: the signs of a row's logits are as good as random.
inline uint64_t pair_of(float x, uint64_t id) {
  const uint32_t u = bits_of(x), key = u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
  return uint64_t(key) << 32 | id;
}

inline float value_of(uint64_t pair) {
  const uint32_t key = uint32_t(pair >> 32);
  return float_of(key ^ (uint32_t(int32_t(~key) >> 31) | 0x80000000u));
}

// The largest x of a row; NaN if the row holds a NaN, a +inf or nothing finite.
float row_max(const float* row, long valid, float inv_t) {
  int bad = 0;
  for (long i = 0; i < valid; ++i) bad |= !(scaled(row[i], inv_t) < kInf);
  const float max = max_of(row, valid, inv_t);
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

struct Scratch {
  std::vector<uint64_t> pairs, sorted;
  std::vector<float> weights;
  std::vector<int32_t> ids;
};

// The lowest retained pair of a row, and the number of pairs retained.
std::pair<uint64_t, long> retained_cut(const float* row, long valid, float inv_t, Nucleus rule, Scratch& scratch) {
  const float max = row_max(row, valid, inv_t);
  if (max != max) return {pair_of(kInf, 0), 0};
  auto& pairs = scratch.pairs;
  pairs.resize(valid);
  const float lowest = log_f32(rule.min_p);
  long n = 0;
  for (long id = 0; id < valid; ++id) {
    const float x = scaled(row[id], inv_t);
    pairs[n] = pair_of(x, uint64_t(id));
    n += x - max >= lowest;
  }
  pairs.resize(n);
  const bool all_p = rule.top_p >= 1.0f;
  if (all_p && rule.top_k == 0) return {*std::min_element(pairs.begin(), pairs.end()), n};

  sort_pairs(pairs, scratch.sorted);
  long start = 0;
  if (rule.top_k > 0 && rule.top_k < n) {
    start = n - rule.top_k;
    while (start > 0 && value_of(pairs[start - 1]) == value_of(pairs[start])) --start;
  }
  if (!all_p) {
    auto& weights = scratch.weights;
    weights.resize(n);
    for (long i = start; i < n; ++i) weights[i] = exp_f32(value_of(pairs[i]) - max);
    double total = 0.0, cumulative = 0.0;
    for (long i = start; i < n; ++i) total += weights[i];
    const float norm = float(total), drop_up_to = 1.0f - rule.top_p;
    for (; start < n - 1; ++start) {
      cumulative += weights[start] / norm;
      if (float(cumulative) > drop_up_to) break;
    }
  }
  return {pairs[start], n - start};
}

// The place among the weights that a number u in [0, 1) falls on. u * total < total in double, so there is one.
long place_of(double u, const std::vector<float>& weights) {
  double total = 0.0, cumulative = 0.0;
  for (float weight : weights) total += weight;
  long i = 0;
  while ((cumulative += weights[i]) <= u * total) ++i;
  return i;
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
    Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
      std::tie(cuts[r], counts[r]) =
          retained_cut(logits + r * columns, valid, inv_t, {top_p, top_k, min_p}, scratch);
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
    Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const float *row = logits + r * columns, max = row_max(row, valid, inv_t);
      tokens[r] = -1;
      if (max != max) continue;
      scratch.ids.resize(valid);
      int32_t* retained = scratch.ids.data();
      const uint64_t cut = cuts ? cuts[r] : 0;
      int64_t n = 0;
      for (int64_t id = 0; id < valid; ++id) {
        retained[n] = int32_t(id);
        n += pair_of(scaled(row[id], inv_t), uint64_t(id)) >= cut;
      }
      if (ids) std::copy(retained, retained + n, ids + offsets[r]);
      scratch.weights.resize(n);
      for (int64_t i = 0; i < n; ++i) scratch.weights[i] = exp_f32(scaled(row[retained[i]], inv_t) - max);
      tokens[r] = retained[place_of(sampling_uniform(seed, uids[r], positions[r]), scratch.weights)];
    }
  }
  return kOk;
}
