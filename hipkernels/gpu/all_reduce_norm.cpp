// All-reduce of FP32 partial sums, residual addition and RMS norm, in one kernel.
//
// LAYOUT. Segments as in segment.h; rows [T, D], row-major: partial FP32, the others BF16. With G workgroups, b makes
// the rows b, b + G, .., as many of them in one generation as its slice holds; with a slot, partial lies there, and one
// generation does. Pushed (push.h), b makes row b alone. A lane holds eight neighbouring elements, the lanes of all
// waves the next ones, round after round.
//
// ROLES. Waiting and publishing: segment.h. All lanes stage, sum over ranks, add the residual and normalise; pushed, the
// last wave serves the peers instead.
//
// REDUCTION ORDER. Over ranks that of transfer.h. Then the bits of add_rms_norm of triton/norm.py: hidden = residual +
// sum, rounded to BF16; the squares of what was rounded are added up, per lane in order of their columns, then over the
// lanes of a wave by butterfly (gfx942: distances 8, 4, 2, 1, 16, 32; sm_90: 16, 8, 4, 2, 1), then over the waves by
// butterfly (4, 2, 1); y = hidden * (1 / sqrt(sum / D + eps)) * w, each operation rounded to FP32, y once to BF16.
#include <cmath>

#include "gpu/push.h"

namespace rlk {

constexpr int kMostColumns = 8192;
constexpr int kElements = 8;  // of a lane, side by side
constexpr int kMostWaves = 8;
constexpr int kRowLanes = kWave * kMostWaves;  // at most
constexpr int kRounds = kMostColumns / (kRowLanes * kElements);
constexpr int kSmallestBlock = 512;  // of triton/norm.py; a row of fewer elements takes as many waves

// Two, for a row's sums are still being read when the next ones are written.
struct RowSums {
  float of_wave[2][kMostWaves];
};

namespace {

struct Eight {
  float x[kElements];
};

RLK_DEVICE inline Eight widen(const Vector16& bf16s) {
  Eight out;
  RLK_UNROLL
  for (int j = 0; j < kElements; ++j) out.x[j] = element<bf16>(bf16s, j);
  return out;
}
RLK_DEVICE inline Vector16 round_eight(const Eight& in) {
  return make_vector<bf16>([&](int j) { return in.x[j]; });
}

// Eight FP32 elements.
struct Pair {
  Vector16 low, high;
};

RLK_DEVICE inline float sum_of_wave(float x) {
  if (kWave == 64) {
    RLK_UNROLL
    for (int lanes = 8; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    x += shuffle_xor(x, 16);
    return x + shuffle_xor(x, 32);
  }
  RLK_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

// The elements of one row that one lane holds; with more than `lanes` lanes, the last hold none.
class Columns {
 public:
  RLK_DEVICE Columns(int lanes, uint32_t D) : lanes_(lanes), D_(D) {}
  RLK_DEVICE uint32_t column(int round) const { return uint32_t(round * lanes_ + lane_index()) * kElements; }
  RLK_DEVICE bool holds(int round) const { return lane_index() < lanes_ && column(round) < D_; }
  // fn(round, first column) for the rounds [begin, end) that there are.
  template <class Fn> RLK_DEVICE void each(int begin, int end, Fn fn) const {
    RLK_UNROLL
    for (int round = begin; round < end; ++round)
      if (holds(round)) fn(round, column(round));
  }

 private:
  int lanes_;
  uint32_t D_;
};

// hidden = the sum over ranks, of which a lane has eight elements, + residual; the squares are added to `squares`.
RLK_DEVICE inline Vector16 add_residual(const Pair& sum, const Vector16& residual, float* squares) {
  Eight added = widen(residual);
  RLK_UNROLL
  for (int j = 0; j < kElements / 2; ++j) {
    added.x[j] += element<float>(sum.low, j);
    added.x[kElements / 2 + j] += element<float>(sum.high, j);
  }
  const Vector16 hidden = round_eight(added);
  const Eight rounded = widen(hidden);
  RLK_UNROLL
  for (int j = 0; j < kElements; ++j) *squares += rounded.x[j] * rounded.x[j];
  return hidden;
}

// 1 / the root mean square of a row, from each lane's squares. All lanes call it.
RLK_DEVICE inline float scale_of_row(float squares, float* of_wave, int lanes, uint32_t D, float eps) {
  const int lane = lane_index();
  squares = sum_of_wave(squares);
  if (lane < kMostWaves && lane >= lanes / kWave) of_wave[lane] = 0.0f;
  if (lane < lanes && lane % kWave == 0) of_wave[lane / kWave] = squares;
  __syncthreads();
  const float total = ((of_wave[0] + of_wave[4]) + (of_wave[2] + of_wave[6])) +
                      ((of_wave[1] + of_wave[5]) + (of_wave[3] + of_wave[7]));
  return 1.0f / sqrtf(total / float(D) + eps);
}

RLK_DEVICE inline Vector16 normalise(const Vector16& hidden, const Vector16& weight, float scale) {
  Eight x = widen(hidden);
  const Eight w = widen(weight);
  RLK_UNROLL
  for (int j = 0; j < kElements; ++j) x.x[j] = x.x[j] * scale * w.x[j];
  return round_eight(x);
}

RLK_DEVICE inline Call norm_call(int slot, uint32_t T, uint32_t D, float eps, uint32_t route) {
  return Call{kAllReduceNorm, kFloat32, uint64_t(T) * D, slot, (bits_of(eps) * 31 + D) * 31 + route};
}

}  // namespace

template <int World>
__global__ void RLK_LANES(kRowLanes)
    all_reduce_norm(Ranks ranks, Progress* progress, int slot, Area area, const char* partial, const char* residual,
                    const char* weight, char* hidden, char* y, uint32_t T, uint32_t D, float eps, int lanes,
                    uint32_t rows_in_slice) {
  RLK_SHARED(Board, board);
  RLK_SHARED(RowSums, sums);
  constexpr int kTogether = World == 1 ? 4 : World == 2 ? 2 : 1;  // rounds whose loads are on their way together
  constexpr bool kEarlyWeights = World < 8;            // 8 ranks' terms leave no registers to hold them
  constexpr uint64_t kWide = sizeof(float), kNarrow = sizeof(bf16);
  Exchange exchange(ranks, *progress, board, norm_call(slot, T, D, eps, kOneShot));
  const Columns columns(lanes, D);
  const uint32_t groups = group_count();
  const uint64_t row_bytes = D * kWide;

  Vector16 weights[kRounds] RLK_UNSET, residuals[kRounds] RLK_UNSET, hiddens[kRounds] RLK_UNSET;
  const auto load_residual = [&](uint32_t row) {
    if (row >= T) return;
    columns.each(0, kRounds, [&](int round, uint32_t column) {
      residuals[round] = load16(residual + (uint64_t(row) * D + column) * kNarrow);
    });
  };
  const auto load_row = [&](uint32_t row, Pair* pairs) {
    const char* from = partial + row * row_bytes;
    columns.each(0, kRounds, [&](int round, uint32_t column) {
      pairs[round] = {load16(from + column * kWide), load16(from + column * kWide + kVector)};
    });
  };
  const auto store_row = [&](char* to, const Pair* pairs) {
    columns.each(0, kRounds, [&](int round, uint32_t column) {
      store16(to + column * kWide, pairs[round].low);
      store16(to + column * kWide + kVector, pairs[round].high);
    });
  };
  const uint64_t offset = area.of_group();
  uint32_t first = group_index();
  const auto load_weights = [&] {
    columns.each(0, kRounds, [&](int round, uint32_t column) { weights[round] = load16(weight + column * kNarrow); });
  };
  if (kEarlyWeights) load_weights();
  load_residual(first);

  do {
    const bool stages = slot == kNoSlot && first < T;
    Pair early[kRounds] RLK_UNSET;  // the first row's loads are on their way while the lanes wait
    if (stages) load_row(first, early);
    if (!exchange.begin()) break;
    if (stages) {
      char* staging = board.segment[ranks.rank] + offset;
      store_row(staging, early);
      for (uint32_t k = 1; k < rows_in_slice && first + k * groups < T; ++k) {
        Pair row[kRounds] RLK_UNSET;
        load_row(first + k * groups, row);
        store_row(staging + k * row_bytes, row);
      }
    }
    if (!exchange.share()) break;
    for (uint32_t k = 0; k < rows_in_slice && first + k * groups < T; ++k) {
      const uint32_t row = first + k * groups;
      const Places<World> places(board, offset + (slot == kNoSlot ? k : row) * row_bytes);
      float squares = 0.0f;
      RLK_UNROLL
      for (int round = 0; round < kRounds; round += kTogether) {
        Terms<World> low[kTogether] RLK_UNSET, high[kTogether] RLK_UNSET;
        const int end = round + kTogether < kRounds ? round + kTogether : kRounds;
        columns.each(round, end, [&](int r, uint32_t column) {
          low[r - round] = places.load(column * kWide);
          high[r - round] = places.load(column * kWide + kVector);
        });
        columns.each(round, end, [&](int r, uint32_t) {
          const Pair sum = {sum_vectors<float>(low[r - round]), sum_vectors<float>(high[r - round])};
          hiddens[r] = add_residual(sum, residuals[r], &squares);
        });
      }
      if (k + 1 < rows_in_slice) load_residual(row + groups);
      if (!kEarlyWeights) load_weights();
      const float scale = scale_of_row(squares, sums.of_wave[k % 2], lanes, D, eps);
      columns.each(0, kRounds, [&](int round, uint32_t column) {
        const uint64_t at = (uint64_t(row) * D + column) * kNarrow;
        store16(hidden + at, hiddens[round]);
        store16(y + at, normalise(hiddens[round], weights[round], scale));
      });
    }
    exchange.finish();
    first += groups * rows_in_slice;
    load_residual(first);
  } while (first < T);
  exchange.end();
}

template <int World>
__global__ void RLK_LANES(kRowLanes + kWave)
    all_reduce_norm_pushed(Ranks ranks, Progress* progress, int slot, uint64_t receive, const char* partial,
                           const char* residual, const char* weight, char* hidden, char* y, uint32_t T, uint32_t D,
                           float eps, int lanes) {
  RLK_SHARED(Board, board);
  RLK_SHARED(RowSums, sums);
  // What is polled together: vectors, and ranks. The registers do not hold 8 ranks' packets.
  constexpr int kVectors = 2 * kRounds, kTogether = World == 2 ? 4 : 1, kHalf = World == 8 ? 4 : World;
  constexpr uint64_t kWide = sizeof(float), kNarrow = sizeof(bf16);
  Exchange exchange(ranks, *progress, board, norm_call(slot, T, D, eps, kPushed), lanes);
  const uint64_t row = group_index();
  const bool some = row < T;  // a call of no rows has a workgroup as well
  const Columns columns(lanes, some ? D : 0);
  const uint32_t half = some ? D / kElements : 0;

  // Of the vectors that are pushed, the low halves of all eights come first, so that lanes store side by side.
  Vector16 vectors[kVectors] RLK_UNSET, residuals[kRounds] RLK_UNSET, weights[kRounds] RLK_UNSET;
  Vector16 hiddens[kRounds] RLK_UNSET;
  columns.each(0, kRounds, [&](int round, uint32_t column) {
    vectors[2 * round] = load16(partial + (row * D + column) * kWide);
    vectors[2 * round + 1] = load16(partial + (row * D + column) * kWide + kVector);
  });
  const auto load_others = [&] {
    columns.each(0, kRounds, [&](int round, uint32_t column) {
      residuals[round] = load16(residual + (row * D + column) * kNarrow);
      weights[round] = load16(weight + column * kNarrow);
    });
  };
  if (World < 8) load_others();
  if (exchange.begin_push()) {
    const Pushing<World> pushing(ranks, exchange, receive, 2 * half);
    columns.each(0, kRounds, [&](int round, uint32_t column) {
      pushing.send(board, column / kElements, vectors[2 * round]);
      pushing.send(board, half + column / kElements, vectors[2 * round + 1]);
    });
    if (lane_index() >= lanes) exchange.hear();
    bool whole = true;
    const auto index = [&](int k) {
      const int round = k / 2;
      return columns.holds(round) ? k % 2 * half + columns.column(round) / kElements : kNoVector;
    };
    RLK_UNROLL
    for (int first = 0; first < kVectors; first += kTogether) {  // the vectors become their sums over ranks
      Terms<kHalf> left[kTogether] RLK_UNSET, right[kTogether] RLK_UNSET;
      const auto place = [&](int k) { return index(first + k); };
      whole &= pushing.template receive<kTogether, 0, kHalf>(board, place, vectors + first, left);
      if (kHalf < World) {
        left[0].of_rank[0] = sum_vectors<float>(left[0]);
        whole &= pushing.template receive<1, World - kHalf, kHalf>(board, place, vectors + first, right);
        vectors[first] = sum_vectors<float>(Terms<2>{{left[0].of_rank[0], sum_vectors<float>(right[0])}});
      } else {
        RLK_UNROLL
        for (int k = 0; k < kTogether; ++k) vectors[first + k] = sum_vectors<float>(left[k]);
      }
    }
    if (World == 8) load_others();
    float squares = 0.0f;
    columns.each(0, kRounds, [&](int round, uint32_t) {
      const Pair sum = {vectors[2 * round], vectors[2 * round + 1]};
      hiddens[round] = add_residual(sum, residuals[round], &squares);
    });
    const float scale = scale_of_row(squares, sums.of_wave[0], lanes, D, eps);
    columns.each(0, kRounds, [&](int round, uint32_t column) {
      if (!whole) return;
      const uint64_t at = (row * D + column) * kNarrow;
      store16(hidden + at, hiddens[round]);
      store16(y + at, normalise(hiddens[round], weights[round], scale));
    });
    exchange.finish_push();
    pushing.sweep(board);
  }
  exchange.end();
}

}  // namespace rlk

using namespace rlk;

// hidden = residual + the sum over ranks of partial, y = rms_norm(hidden) * weight; hidden may be residual. With a
// slot, partial is what lies there, and the pointer is not read. D: a multiple of 16, at most 8192, and a row of FP32
// fits a slice, or is at most push_bytes; at most kMostGroups rows are pushed. Route: one shot, or pushed.
RLK_EXPORT int rlk_gpu_all_reduce_rms_norm(const Ranks* ranks, Progress* progress, int route, int slot,
                                           const void* partial, const void* residual, const void* weight, void* hidden,
                                           void* y, int64_t T, int64_t D, float eps, void* stream) {
  if (!is_valid(*ranks) || T < 0 || T > INT32_MAX || D <= 0 || D % 16 || D > kMostColumns) return kBadShape;
  const bool pushed = route == kPushed && ranks->world > 1;
  const uint64_t row_bytes = uint64_t(D) * sizeof(float);
  if ((route != kOneShot && route != kPushed) || !fits(*ranks, slot, T * row_bytes)) return kBadShape;
  if (pushed ? T > kMostGroups || row_bytes > ranks->push_bytes : slot == kNoSlot && row_bytes > ranks->slice_bytes)
    return kBadShape;
  for (const void* pointer : {partial, residual, weight, static_cast<const void*>(hidden), static_cast<const void*>(y)})
    if (!is_aligned(pointer)) return kMisaligned;
  int block = kSmallestBlock;
  while (block < D) block *= 2;
  const int waves = block / (kWave * kElements), lanes = kWave * (waves < kMostWaves ? waves : kMostWaves);
  const int64_t groups = T < 1 ? 1 : T < kMostGroups ? T : kMostGroups;
  const uint32_t rows = slot == kNoSlot ? uint32_t(ranks->slice_bytes / row_bytes) : uint32_t(T / groups + 1);
  const auto* residuals = static_cast<const char*>(residual);
  const auto* weights = static_cast<const char*>(weight);
  const Area area = area_of(*ranks, slot, 0);
  const char* from = pushed && slot != kNoSlot ? ranks->segment[ranks->rank] + area.offset
                                               : static_cast<const char*>(partial);
  char *hiddens = static_cast<char*>(hidden), *ys = static_cast<char*>(y);
  return with_world(ranks->world, [&](auto world) {
    constexpr int kWorld = decltype(world)::value;
    if (pushed) {
      const auto kernel = all_reduce_norm_pushed<kWorld < 2 ? 2 : kWorld>;
      return RLK_LAUNCH(kernel, groups, lanes + kWave, stream, *ranks, progress, slot,
                        receive_offset(ranks->slice_bytes, ranks->direct_bytes), from, residuals, weights, hiddens, ys,
                        uint32_t(T), uint32_t(D), eps, lanes);
    }
    return RLK_LAUNCH(all_reduce_norm<kWorld>, groups, lanes, stream, *ranks, progress, slot, area, from, residuals,
                      weights, hiddens, ys, uint32_t(T), uint32_t(D), eps, lanes, rows);
  });
}
