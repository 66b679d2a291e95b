// Drawing each row's token from what it keeps, and keeping the retained sets (ops/sampler.py has the rule,
// gpu/sampler.h the layout; sampler_select.cpp found what is kept).
//
//   sampler_count   each segment's retained entries and their weight
//   sampler_write   the retained sets as CSR, with their logits, and as bit masks; the token, in the segment it falls on
//   sampler_greedy  instead of both: the lowest id of the largest logit
//   sampler_record  appends the step to a log on the device: tokens, log-probs, and each row's set as ids or as a bit
//                   mask, whichever is shorter
//
// Order: a weight is e = exp(x - max) in FP32, cut to a multiple of 2**-44; sums of them are exact. The token is the
// first, by id, whose cumulative weight exceeds u * total: with u = m / 2**53, an integer product without rounding. The
// noise of row r depends on (seed, uids[r], positions[r]) and on nothing else.
#include "gpu/sampler.h"
#include "philox.h"

namespace rlk {

using namespace sampler;

namespace {

constexpr int kCopies = 8;         // workgroups that copy one row into the log
constexpr int kLanesOfWord = 8;    // lanes whose quads make 32 bits of a mask

RLK_DEVICE inline uint64_t weight_of(float x, float top) { return fixed_point(exp_f32(x - top), kWeightBits); }

// floor(u * total), which is below total.
RLK_DEVICE inline uint64_t sampling_point(const RowRule& rule, int64_t uid, int64_t position, uint64_t total) {
  const uint64_t m = uint64_t(sampling_uniform(rule.seed, uint64_t(uid), uint64_t(position)) * 0x1p53);
  return uint64_t((unsigned __int128)(m << 11) * total >> 64);
}

// What lies before a segment in its row.
struct RowSums {
  uint64_t kept, weight, total;  // entries and weight of the segments below; weight of all
};
RLK_DEVICE inline RowSums row_sums(const RowState& state, int segment, int segments) {
  RowSums sums = {0, 0, 0};
  for (int s = lane_index() % kWave; s < segments; s += kWave) {
    sums.kept += s < segment ? state.kept[s] : 0;
    sums.weight += s < segment ? state.weight[s] : 0;
    sums.total += state.weight[s];
  }
  return reduce_wave(sums, [](RowSums a, RowSums b) {
    return RowSums{a.kept + b.kept, a.weight + b.weight, a.total + b.total};
  });
}

struct WriteRoom {
  WaveRoom<uint64_t> sums;
};

}  // namespace

extern "C" __global__ void RLK_LANES(kLanes)
    sampler_count(const float* logits, int64_t columns, int valid, int segments, const RowRule* rules,
                  RowState* states) {
  RLK_SHARED(WaveRoom<uint64_t>, room);
  const Place place = place_of(segments);
  RowState& state = states[place.row];
  const Logits mine = load_segment(logits, columns, valid, place);
  const float top = row_top(state, segments);
  uint64_t count = 0, weight = 0;
  if (sampled(top)) {
    const Kept kept = kept_of(rules[place.row], state, top);
    for_ids(mine, valid, place.segment, kept.inv_t, [&](int, int, uint32_t id, float, float x) {
      const bool has = kept.has(x, id);
      count += has;
      weight += has ? weight_of(x, top) : 0;
    });
  }
  const auto add = [](uint64_t a, uint64_t b) { return a + b; };
  count = reduce_group(count, room, add);
  weight = reduce_group(weight, room, add);
  if (lane_index() != 0) return;
  state.kept[place.segment] = uint32_t(count);
  state.weight[place.segment] = weight;
  if (count) add_global(&state.retained, uint32_t(count));
}

// offsets == nullptr: the set is the whole vocabulary and is not written, and values[r] is the token's logit. masks, if
// given, is [rows, segments * 128]. index[r] is the token's entry.
extern "C" __global__ void RLK_LANES(kLanes)
    sampler_write(const float* logits, int64_t columns, int valid, int segments, const RowRule* rules,
                  const RowState* states, const int64_t* uids, const int64_t* positions, int64_t* tokens,
                  int64_t* index, int64_t* offsets, int32_t* ids, float* values, uint32_t* masks) {
  RLK_SHARED(WriteRoom, room);
  const Place place = place_of(segments);
  const int lane = lane_index(), row = place.row;
  const RowState& state = states[row];
  const RowRule rule = rules[row];
  const Logits mine = load_segment(logits, columns, valid, place);
  const float top = row_top(state, segments);
  const bool good = sampled(top);
  const Kept kept = kept_of(rule, state, top);
  uint64_t has[kQuads];  // a bit for each of the quad's ids
  RLK_UNROLL
  for (int v = 0; v < kQuads; ++v) has[v] = 0;
  for_ids(mine, valid, place.segment, kept.inv_t, [&](int v, int j, uint32_t id, float, float x) {
    has[v] |= uint64_t(good && kept.has(x, id)) << j;
  });

  uint64_t before = 0;
  if (offsets)
    for (int r = lane; r < row; r += kLanes) before += states[r].retained;
  const int64_t row_begin = int64_t(reduce_group(before, room.sums, [](uint64_t a, uint64_t b) { return a + b; }));
  const RowSums sums = row_sums(state, place.segment, segments);
  if (place.segment == 0 && lane == 0) {
    if (offsets) {
      offsets[row] = row_begin;
      if (row == group_count() / segments - 1) offsets[row + 1] = row_begin + state.retained;
    }
    if (!good) tokens[row] = index[row] = -1;
  }
  if (!good && !masks) return;

  // Entries before this lane, for all four quads in one sum: a quad of all lanes holds at most 1024.
  uint64_t packed = 0;
  RLK_UNROLL
  for (int v = 0; v < kQuads; ++v) packed |= uint64_t(__builtin_popcountll(has[v])) << (16 * v);
  const Prefix<uint64_t> counts = prefix_group(packed, room.sums);
  const int64_t begin = row_begin + int64_t(sums.kept);
  int64_t entry[kQuads], passed = begin;
  RLK_UNROLL
  for (int v = 0; v < kQuads; ++v) {
    entry[v] = passed + int64_t(counts.before >> (16 * v) & 0xffff);
    passed += int64_t(counts.total >> (16 * v) & 0xffff);
  }
  if (offsets) {
    for_ids(mine, valid, place.segment, kept.inv_t, [&](int v, int j, uint32_t id, float logit, float) {
      if (!(has[v] >> j & 1)) return;
      const int64_t n = entry[v] + __builtin_popcountll(has[v] & ((1u << j) - 1u));
      ids[n] = int32_t(id);
      values[n] = logit + 0.0f;
    });
  }
  if (masks) {
    RLK_UNROLL
    for (int v = 0; v < kQuads; ++v) {
      uint32_t word = uint32_t(has[v]) << (lane % kLanesOfWord * 4);
      for (int lanes = 1; lanes < kLanesOfWord; lanes *= 2) word |= shuffle_xor(word, lanes);
      const int64_t first = (int64_t(row) * segments + place.segment) * (kSegment / 32) + v * (kLanes / kLanesOfWord);
      if (lane % kLanesOfWord == 0) masks[first + lane / kLanesOfWord] = word;
    }
  }
  if (!good) return;

  const uint64_t point = sampling_point(rule, uids[row], positions[row], sums.total);
  if (point < sums.weight || point >= sums.weight + state.weight[place.segment]) return;
  uint64_t reached = sums.weight;
  RLK_UNROLL
  for (int v = 0; v < kQuads; ++v) {
    uint64_t weight[4], sum = 0;
    RLK_UNROLL
    for (int j = 0; j < 4; ++j) {
      weight[j] = has[v] >> j & 1 ? weight_of(scaled(mine.quad[v][j], kept.inv_t), top) : 0;
      sum += weight[j];
    }
    const Prefix<uint64_t> weights = prefix_group(sum, room.sums);
    uint64_t below = reached + weights.before;
    RLK_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (below <= point && point < below + weight[j]) {
        tokens[row] = id_at(place.segment, v, j);
        index[row] = offsets ? entry[v] + __builtin_popcountll(has[v] & ((1u << j) - 1u)) : row;
        if (!offsets) values[row] = mine.quad[v][j] + 0.0f;
      }
      below += weight[j];
    }
    reached += weights.total;
  }
}

extern "C" __global__ void RLK_LANES(kLanes)
    sampler_greedy(const float* logits, int64_t columns, int valid, int segments, const RowRule* rules,
                   const RowState* states, int64_t* tokens, int64_t* index, float* values) {
  RLK_SHARED(WaveRoom<uint32_t>, room);
  const int row = group_index();
  const RowState& state = states[row];
  const float top = row_top(state, segments);
  const auto lower = [](uint32_t a, uint32_t b) { return b < a ? b : a; };
  uint32_t segment = uint32_t(segments);
  for (int s = lane_index() % kWave; s < segments; s += kWave)
    segment = state.top[s] == top ? lower(segment, uint32_t(s)) : segment;
  const Place place = {row, int(reduce_wave(segment, lower))};
  uint32_t token = ~0u;
  const Logits mine = load_segment(logits, columns, valid, place);
  for_ids(mine, valid, place.segment, rules[row].inv_t, [&](int, int, uint32_t id, float, float x) {
    token = x == top ? lower(token, id) : token;
  });
  token = reduce_group(token, room, lower);
  if (lane_index() != 0) return;
  const bool good = sampled(top);
  tokens[row] = good ? int64_t(token) : -1;
  index[row] = good ? row : -1;
  values[row] = good ? logits[row * columns + token] + 0.0f : kNegInf;
}

struct SamplerLog {
  const int64_t* step;  // of now, from 0
  int64_t steps, capacity;
  int64_t* cursors;  // [steps + 1]: where a step's words begin
  int32_t* counts;   // [steps, rows]: entries of a row's set
  int32_t* tokens;   // [steps, rows]
  float* logprobs;   // [steps, rows]
  uint32_t* words;   // [capacity]
};

// What lies outside the log is dropped: the reader finds `step` or a cursor beyond its end. offsets == nullptr: there
// are no sets.
extern "C" __global__ void RLK_LANES(kLanes)
    sampler_record(SamplerLog log, int segments, int mask_words, const int64_t* tokens, const float* logprobs,
                   const int64_t* offsets, const int32_t* ids, const uint32_t* masks) {
  RLK_SHARED(WaveRoom<uint64_t>, room);
  const int row = group_index() / kCopies, copy = group_index() % kCopies, rows = group_count() / kCopies;
  const int lane = lane_index();
  const int64_t step = *log.step;
  if (step >= log.steps) return;
  const int64_t shortest = mask_words;
  uint64_t before = 0;
  if (offsets)
    for (int r = lane; r < row; r += kLanes) {
      const int64_t n = offsets[r + 1] - offsets[r];
      before += uint64_t(n < shortest ? n : shortest);
    }
  before = reduce_group(before, room, [](uint64_t a, uint64_t b) { return a + b; });
  const int64_t begin = offsets ? offsets[row] : 0, n = offsets ? offsets[row + 1] - begin : 0;
  const int64_t count = n < shortest ? n : shortest, start = log.cursors[step] + int64_t(before);
  if (copy == 0 && lane == 0) {
    const int64_t at = step * rows + row;
    log.counts[at] = int32_t(n);
    log.tokens[at] = int32_t(tokens[row]);
    log.logprobs[at] = logprobs[row];
    if (row == rows - 1) log.cursors[step + 1] = start + count;
  }
  if (start + count > log.capacity) return;
  const uint32_t* mask = masks + int64_t(row) * segments * (kSegment / 32);
  for (int64_t i = copy * kLanes + lane; i < count; i += kCopies * kLanes)
    log.words[start + i] = n > shortest ? mask[i] : uint32_t(ids[begin + i]);
}

}  // namespace rlk

using namespace rlk;

// After rlk_gpu_sampler_select: tokens[r] and its entry index[r], -1 for a row that holds a NaN, a +inf or nothing
// finite. The sets go to offsets [rows + 1], ids and values (unscaled logits), room for rows * valid entries; without
// offsets the vocabulary is the set, and values is [rows]. masks may be null.
RLK_EXPORT int rlk_gpu_sampler_draw(const float* logits, int64_t rows, int64_t columns, int64_t valid,
                                    const void* rules, void* states, const int64_t* uids, const int64_t* positions,
                                    int64_t* tokens, int64_t* index, int64_t* offsets, int32_t* ids, float* values,
                                    uint32_t* masks, void* stream) {
  if (!fits(rows, columns, valid)) return kBadShape;
  if (rows == 0) return kOk;
  const auto* rule = static_cast<const RowRule*>(rules);
  auto* state = static_cast<RowState*>(states);
  const int segments = segments_of(valid), within = int(valid);
  const int64_t groups = rows * segments;
  const int code = RLK_LAUNCH(sampler_count, groups, kLanes, stream, logits, columns, within, segments, rule, state);
  if (code != kOk) return code;
  const RowState* counted = state;
  return RLK_LAUNCH(sampler_write, groups, kLanes, stream, logits, columns, within, segments, rule, counted, uids,
                    positions, tokens, index, offsets, ids, values, masks);
}

// After rlk_gpu_sampler_select without stages, for rules of temperature 1: the lowest id of the largest logit.
RLK_EXPORT int rlk_gpu_sampler_greedy(const float* logits, int64_t rows, int64_t columns, int64_t valid,
                                      const void* rules, const void* states, int64_t* tokens, int64_t* index,
                                      float* values, void* stream) {
  if (!fits(rows, columns, valid)) return kBadShape;
  if (rows == 0) return kOk;
  return RLK_LAUNCH(sampler_greedy, rows, kLanes, stream, logits, columns, int(valid), segments_of(valid),
                    static_cast<const RowRule*>(rules), static_cast<const RowState*>(states), tokens, index, values);
}

// Appends the step that *step names; offsets, ids and masks are sampler_draw's, or null where there are no sets.
RLK_EXPORT int rlk_gpu_sampler_record(const int64_t* step, int64_t steps, int64_t capacity, int64_t* cursors,
                                      int32_t* counts, int32_t* tokens_log, float* logprobs_log, uint32_t* words,
                                      int64_t rows, int64_t valid, const int64_t* tokens, const float* logprobs,
                                      const int64_t* offsets, const int32_t* ids, const uint32_t* masks, void* stream) {
  if (!fits(rows, valid, valid)) return kBadShape;
  if (rows == 0) return kOk;
  const SamplerLog log = {step, steps, capacity, cursors, counts, tokens_log, logprobs_log, words};
  return RLK_LAUNCH(sampler_record, rows * kCopies, kLanes, stream, log, segments_of(valid), int((valid + 31) / 32),
                    tokens, logprobs, offsets, ids, masks);
}
