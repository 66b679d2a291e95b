// What each row keeps: min-p, top-k, then top-p (ops/sampler.py has the rule, gpu/sampler.h the layout).
//
//   sampler_max        each segment's largest x; clears the workspace
//   then for top-k, and after sampler_norm for top-p:
//   sampler_histogram  a row's bins, by distance from its largest x: counts, or probabilities
//   sampler_gather     finds the bin that holds the cut; lists the pairs that lie in it
//   sampler_resolve    the cut among them, by digits of eight bits of the pair from the highest that differs
//
// Order: top-p's normaliser is summed in double: a lane's 16 weights ascending, the lanes by the tree 128, 64, .. 1,
// the segments ascending. Everything else is a sum of integers, in whatever order: a probability e / norm is rounded
// to FP32 as on the CPU, and enters the cumulative sum as a multiple of 2**-62.
#include "gpu/sampler.h"

namespace rlk {

using namespace sampler;

namespace {

struct TreeRoom {
  double sum[kLanes];
};

// The double sum over the lanes in one tree; in lane 0.
RLK_DEVICE inline double sum_in_tree(double mine, TreeRoom& room) {
  const int lane = lane_index();
  for (int half = kLanes / 2; half >= kWave; half /= 2) {
    if (lane < 2 * half) room.sum[lane] = mine;  // what the level above may still be reading lies beyond
    __syncthreads();
    if (lane < half) mine += room.sum[lane + half];
  }
  if (lane < kWave)
    for (int half = kWave / 2; half > 0; half /= 2) mine += shuffle_down(mine, half);
  return mine;
}

RLK_DEVICE inline bool runs(const RowRule& rule, int stage) {
  return stage == kTopK ? rule.top_k > 0 : rule.drop_limit > 0;
}

// What an entry adds to the stage's sums.
RLK_DEVICE inline uint64_t share(int stage, float x, float top, float norm) {
  return stage == kTopK ? 1 : probability(x, top, norm);
}

constexpr int kPerLane = kBins / kLanes;

struct GatherRoom {
  WaveRoom<uint64_t> sums;
  WaveRoom<uint32_t> counts;
  Crossing crossing;
  uint32_t slot;
};

// Where the stage's cut lies. Bins ascend in value as their numbers fall.
RLK_DEVICE inline Crossing find_crossing(const RowRule& rule, const RowState& state, int stage, GatherRoom& room) {
  uint64_t mine[kPerLane], sum = 0;
  RLK_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
    mine[i] = state.histogram[stage][kBins - 1 - (lane_index() * kPerLane + i)];
    sum += mine[i];
  }
  const Prefix<uint64_t> sums = prefix_group(sum, room.sums);
  const uint64_t k = uint64_t(rule.top_k);
  const uint64_t limit = stage == kTopP ? rule.drop_limit : k < sums.total ? sums.total - k : 0;
  const bool all = stage == kTopK && k >= sums.total;
  // No sum need be above top-p's limit: probabilities are rounded. Then all but the last is dropped; it is in bin 0.
  const bool last = lane_index() == kLanes - 1 && sums.total <= limit;
  if (all ? lane_index() == 0 : last || (sums.before <= limit && limit < sums.before + sum)) {
    Crossing found = {sums.before, limit, all ? -1 : 0, 0};
    uint64_t passed = sums.before;
    RLK_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const bool here = passed <= limit && (limit < passed + mine[i] || (last && i == kPerLane - 1));
      if (here && !all) found.before = passed, found.bin = kBins - 1 - (lane_index() * kPerLane + i);
      passed += mine[i];
    }
    room.crossing = found;
  }
  __syncthreads();
  return room.crossing;
}

struct HistogramRoom {
  uint64_t bins[kBins];
  WaveRoom<uint64_t> sums;
};

constexpr int kDigitBits = 8;
static_assert(1 << kDigitBits == kLanes, "a lane counts one digit");

struct ResolveRoom {
  uint64_t sums[kLanes];
  uint32_t counts[kLanes];
  WaveRoom<uint64_t> waves;
  uint64_t before, cut;
  uint32_t digit, count;
};

// Do the bits of a pair from `width` on agree with the prefix?
RLK_DEVICE inline bool agrees(uint64_t pair, uint64_t prefix, int width) {
  return width == 64 || (pair ^ prefix) >> width == 0;
}

}  // namespace

extern "C" __global__ void RLK_LANES(kLanes)
    sampler_max(const float* logits, int64_t columns, int valid, int segments, const RowRule* rules, RowState* states,
                int64_t* step) {
  RLK_SHARED(WaveRoom<float>, room);
  const Place place = place_of(segments);
  RowState& state = states[place.row];
  const Logits mine = load_segment(logits, columns, valid, place);
  for (int i = place.segment * kLanes + lane_index(); i < 2 * kBins; i += segments * kLanes)
    state.histogram[0][i] = 0;
  if (place.segment == 0 && lane_index() < 2) {
    state.cut[lane_index()] = 0;
    state.crossing[lane_index()] = {0, 0, -1, 0};
    state.retained = 0;
  }
  if (step && group_index() == 0 && lane_index() == 0) *step += 1;
  float top = kNegInf;
  for_ids(mine, valid, place.segment, rules[place.row].inv_t, [&](int, int, uint32_t, float, float x) {
    top = !(x < kInf) ? kInf : x > top ? x : top;
  });
  top = reduce_group(top, room, [](float a, float b) { return b > a ? b : a; });
  if (lane_index() == 0) state.top[place.segment] = top;
}

extern "C" __global__ void RLK_LANES(kLanes)
    sampler_norm(const float* logits, int64_t columns, int valid, int segments, const RowRule* rules,
                 RowState* states) {
  RLK_SHARED(TreeRoom, room);
  const Place place = place_of(segments);
  RowState& state = states[place.row];
  const Logits mine = load_segment(logits, columns, valid, place);
  const float top = row_top(state, segments);
  if (!sampled(top) || !runs(rules[place.row], kTopP)) return;
  const Kept kept = kept_of(rules[place.row], state, top);
  double sum = 0.0;
  for_ids(mine, valid, place.segment, kept.inv_t, [&](int, int, uint32_t id, float, float x) {
    sum += kept.has(x, id) ? exp_f32(x - top) : 0.0f;
  });
  sum = sum_in_tree(sum, room);
  if (lane_index() == 0) state.sum[place.segment] = sum;
}

extern "C" __global__ void RLK_LANES(kLanes)
    sampler_histogram(const float* logits, int64_t columns, int valid, int segments, const RowRule* rules,
                      RowState* states, int stage) {
  RLK_SHARED(HistogramRoom, room);
  const Place place = place_of(segments);
  RowState& state = states[place.row];
  const Logits mine = load_segment(logits, columns, valid, place);
  const float top = row_top(state, segments);
  if (!sampled(top) || !runs(rules[place.row], stage)) return;
  const Kept kept = kept_of(rules[place.row], state, top);
  const float norm = stage == kTopP ? norm_of(state, segments) : 1.0f;
  for (int bin = lane_index(); bin < kBins; bin += kLanes) room.bins[bin] = 0;
  __syncthreads();
  uint64_t far = 0;  // the last bin's, which may be most of the row
  for_ids(mine, valid, place.segment, kept.inv_t, [&](int, int, uint32_t id, float, float x) {
    if (!kept.has(x, id)) return;
    const uint64_t mass = share(stage, x, top, norm);
    const int bin = bin_of(x, top);
    if (bin == kBins - 1)
      far += mass;
    else if (mass)
      add_shared(&room.bins[bin], mass);
  });
  far = reduce_group(far, room.sums, [](uint64_t a, uint64_t b) { return a + b; });  // its barriers end the adds above
  for (int bin = lane_index(); bin < kBins; bin += kLanes) {
    const uint64_t mass = bin == kBins - 1 ? far : room.bins[bin];
    if (mass) add_global(&state.histogram[stage][bin], mass);
  }
}

// candidates is [rows, segments * 4096].
extern "C" __global__ void RLK_LANES(kLanes)
    sampler_gather(const float* logits, int64_t columns, int valid, int segments, const RowRule* rules,
                   RowState* states, uint64_t* candidates, int stage) {
  RLK_SHARED(GatherRoom, room);
  const Place place = place_of(segments);
  RowState& state = states[place.row];
  const Logits mine = load_segment(logits, columns, valid, place);
  const float top = row_top(state, segments);
  if (!sampled(top) || !runs(rules[place.row], stage)) return;
  const Kept kept = kept_of(rules[place.row], state, top);
  const Crossing crossing = find_crossing(rules[place.row], state, stage, room);
  if (crossing.bin < 0) return;
  uint32_t count = 0;
  for_ids(mine, valid, place.segment, kept.inv_t, [&](int, int, uint32_t id, float, float x) {
    count += kept.has(x, id) && bin_of(x, top) == crossing.bin;
  });
  const Prefix<uint32_t> counts = prefix_group(count, room.counts);
  if (lane_index() == 0) {
    if (counts.total) room.slot = add_global(&state.crossing[stage].candidates, counts.total);
    if (place.segment == 0) {
      state.crossing[stage].before = crossing.before;
      state.crossing[stage].limit = crossing.limit;
      state.crossing[stage].bin = crossing.bin;
    }
  }
  __syncthreads();
  if (count == 0) return;
  uint64_t* out = candidates + place.row * int64_t(segments) * kSegment + room.slot + counts.before;
  for_ids(mine, valid, place.segment, kept.inv_t, [&](int, int, uint32_t id, float, float x) {
    if (kept.has(x, id) && bin_of(x, top) == crossing.bin) *out++ = pair_of(x, id);
  });
}

extern "C" __global__ void RLK_LANES(kLanes)
    sampler_resolve(int segments, const RowRule* rules, RowState* states, const uint64_t* candidates, int stage) {
  RLK_SHARED(ResolveRoom, room);
  const int lane = lane_index();
  RowState& state = states[group_index()];
  const float top = row_top(state, segments);
  if (!sampled(top) || !runs(rules[group_index()], stage)) return;
  const Crossing crossing = state.crossing[stage];
  if (crossing.bin < 0) return;
  const float norm = stage == kTopP ? norm_of(state, segments) : 1.0f;
  const uint64_t* pairs = candidates + group_index() * int64_t(segments) * kSegment;
  const int n = int(crossing.candidates), last_bit = stage == kTopK ? 32 : 0;  // top-k cuts between values

  uint64_t low = ~uint64_t(0), high = 0;
  for (int i = lane; i < n; i += kLanes) {
    low = pairs[i] < low ? pairs[i] : low;
    high = pairs[i] > high ? pairs[i] : high;
  }
  low = reduce_group(low, room.waves, [](uint64_t a, uint64_t b) { return b < a ? b : a; });
  high = reduce_group(high, room.waves, [](uint64_t a, uint64_t b) { return b > a ? b : a; });
  int width = last_bit;  // bits of the cut that are not known yet
  while (width < 64 && !agrees(low, high, width)) ++width;
  uint64_t prefix = high, before = crossing.before;
  uint32_t count = uint32_t(n);
  while (width > last_bit && count > 1) {
    const int shift = width - kDigitBits > last_bit ? width - kDigitBits : last_bit;
    room.sums[lane] = 0;
    room.counts[lane] = 0;
    __syncthreads();
    for (int i = lane; i < n; i += kLanes) {
      const uint64_t pair = pairs[i];
      if (!agrees(pair, prefix, width)) continue;
      const int digit = int((pair >> shift) & ((1u << (width - shift)) - 1u));
      add_shared(&room.sums[digit], share(stage, value_of(pair), top, norm));
      add_shared(&room.counts[digit], 1u);
    }
    __syncthreads();
    // The first digit whose sum is above the limit; where there is none, the last that occurs.
    const uint64_t sum = room.sums[lane];
    const Prefix<uint64_t> sums = prefix_group(sum, room.waves);
    const bool never = before + sums.total <= crossing.limit;
    const uint64_t last = reduce_group(uint64_t(room.counts[lane] ? lane : 0), room.waves,
                                       [](uint64_t a, uint64_t b) { return b > a ? b : a; });
    const uint64_t passed = before + sums.before;
    if (never ? uint64_t(lane) == last : passed <= crossing.limit && crossing.limit < passed + sum) {
      room.digit = uint32_t(lane);
      room.before = passed;
      room.count = room.counts[lane];
    }
    __syncthreads();
    const uint64_t above = width == 64 ? 0 : prefix >> width << width;
    prefix = above | uint64_t(room.digit) << shift;
    before = room.before;
    count = room.count;
    width = shift;
    __syncthreads();
  }
  for (int i = lane; i < n; i += kLanes)  // one pair, or several of one value
    if (agrees(pairs[i], prefix, width)) room.cut = stage == kTopK ? pairs[i] >> 32 << 32 : pairs[i];
  __syncthreads();
  const bool zero = stage == kTopK && value_of(room.cut) == 0.0f;  // 0.0 and -0.0 are one value
  if (lane == 0) state.cut[stage] = zero ? pair_of(-0.0f, 0) : room.cut;
}

}  // namespace rlk

using namespace rlk;

// Finds what every row keeps. `stages` is 1 if any row has a top-k, plus 2 if any has a top-p; `step`, if given, is
// advanced by one. states is [rows] of RowState, candidates [rows, segments * 4096].
RLK_EXPORT int rlk_gpu_sampler_select(const float* logits, int64_t rows, int64_t columns, int64_t valid,
                                      const void* rules, int stages, void* states, uint64_t* candidates, int64_t* step,
                                      void* stream) {
  if (!fits(rows, columns, valid)) return kBadShape;
  if (rows == 0) return kOk;
  const auto* rule = static_cast<const RowRule*>(rules);
  auto* state = static_cast<RowState*>(states);
  const int segments = segments_of(valid), ids = int(valid);
  const int64_t groups = rows * segments;
  int code = RLK_LAUNCH(sampler_max, groups, kLanes, stream, logits, columns, ids, segments, rule, state, step);
  for (int stage = kTopK; stage <= kTopP && code == kOk; ++stage) {
    if (!(stages >> stage & 1)) continue;
    if (stage == kTopP)
      code = RLK_LAUNCH(sampler_norm, groups, kLanes, stream, logits, columns, ids, segments, rule, state);
    if (code == kOk)
      code = RLK_LAUNCH(sampler_histogram, groups, kLanes, stream, logits, columns, ids, segments, rule, state, stage);
    if (code == kOk)
      code = RLK_LAUNCH(sampler_gather, groups, kLanes, stream, logits, columns, ids, segments, rule, state,
                        candidates, stage);
    if (code == kOk)
      code = RLK_LAUNCH(sampler_resolve, rows, kLanes, stream, segments, rule, state, candidates, stage);
  }
  return code;
}

// Bytes of one row's workspace, and ids of a segment.
RLK_EXPORT int rlk_gpu_sampler_sizes(int64_t* state_bytes, int64_t* segment) {
  *state_bytes = int64_t(sizeof(RowState));
  *segment = kSegment;
  return kOk;
}
