// All-reduce of FP32 partial sums, residual addition and RMS norm, in one kernel.
//
// LAYOUT. Segments as in segment.h; rows [T, D], row-major: partial FP32, the others BF16. With G workgroups, b makes the
// rows b, b + G, .., as many of them in one generation as its slice holds; with a slot, partial lies there, and one
// generation does. A lane holds eight neighbouring elements, the lanes of all waves the next ones, round after round.
//
// ROLES. Waiting and publishing: segment.h. All lanes stage, sum over ranks, add the residual and normalise.
//
// REDUCTION ORDER. Over ranks that of transfer.h. Then the bits of add_rms_norm of triton/norm.py: hidden = residual +
// sum, rounded to BF16; the squares of what was rounded are added up, per lane in order of their columns, then over the
// lanes of a wave by butterfly (gfx942: distances 8, 4, 2, 1, 16, 32; sm_90: 16, 8, 4, 2, 1), then over the waves by
// butterfly (4, 2, 1); y = hidden * (1 / sqrt(sum / D + eps)) * w, each operation rounded to FP32, y once to BF16.
#include <cmath>

#include "gpu/transfer.h"

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

// Eight FP32 elements, and those of each rank.
struct Pair {
  Vector16 low, high;
};
template <int World> struct TermPair {
  Terms<World> low, high;
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

// The elements of one row that one lane holds.
class Columns {
 public:
  RLK_DEVICE Columns(int lanes, uint32_t D) : lanes_(lanes), D_(D) {}
  // fn(round, first column) for the rounds [begin, end) that there are.
  template <class Fn> RLK_DEVICE void each(int begin, int end, Fn fn) const {
    RLK_UNROLL
    for (int round = begin; round < end; ++round) {
      const uint32_t column = uint32_t(round * lanes_ + lane_index()) * kElements;
      if (column < D_) fn(round, column);
    }
  }

 private:
  int lanes_;
  uint32_t D_;
};

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
  const uint32_t eps_bits = bits_of(eps);
  Exchange exchange(ranks, *progress, board,
                    Call{kAllReduceNorm, kFloat32, uint64_t(T) * D, slot, eps_bits * 31 + D});
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
        TermPair<World> terms[kTogether] RLK_UNSET;
        columns.each(round, round + kTogether < kRounds ? round + kTogether : kRounds, [&](int r, uint32_t column) {
          terms[r - round].low = places.load(column * kWide);
          terms[r - round].high = places.load(column * kWide + kVector);
        });
        columns.each(round, round + kTogether < kRounds ? round + kTogether : kRounds, [&](int r, uint32_t) {
          const Pair sum = {sum_vectors<float>(terms[r - round].low), sum_vectors<float>(terms[r - round].high)};
          Eight added = widen(residuals[r]);
          RLK_UNROLL
          for (int j = 0; j < kElements / 2; ++j) {
            added.x[j] += element<float>(sum.low, j);
            added.x[kElements / 2 + j] += element<float>(sum.high, j);
          }
          hiddens[r] = round_eight(added);
          const Eight rounded = widen(hiddens[r]);
          RLK_UNROLL
          for (int j = 0; j < kElements; ++j) squares += rounded.x[j] * rounded.x[j];
        });
      }
      if (k + 1 < rows_in_slice) load_residual(row + groups);
      if (!kEarlyWeights) load_weights();
      squares = sum_of_wave(squares);
      float* of_wave = sums.of_wave[k % 2];
      if (lane_index() < kMostWaves && lane_index() >= lanes / kWave) of_wave[lane_index()] = 0.0f;
      if (lane_index() % kWave == 0) of_wave[lane_index() / kWave] = squares;
      __syncthreads();
      const float total = ((of_wave[0] + of_wave[4]) + (of_wave[2] + of_wave[6])) +
                          ((of_wave[1] + of_wave[5]) + (of_wave[3] + of_wave[7]));
      const float scale = 1.0f / sqrtf(total / float(D) + eps);
      columns.each(0, kRounds, [&](int round, uint32_t column) {
        const uint64_t at = (uint64_t(row) * D + column) * kNarrow;
        Eight x = widen(hiddens[round]);
        const Eight w = widen(weights[round]);
        RLK_UNROLL
        for (int j = 0; j < kElements; ++j) x.x[j] = x.x[j] * scale * w.x[j];
        store16(hidden + at, hiddens[round]);
        store16(y + at, round_eight(x));
      });
    }
    exchange.finish();
    first += groups * rows_in_slice;
    load_residual(first);
  } while (first < T);
  exchange.end();
}

}  // namespace rlk

using namespace rlk;

// hidden = residual + the sum over ranks of partial, y = rms_norm(hidden) * weight; hidden may be residual. With a slot,
// partial is what lies there, and the pointer is not read. D: a multiple of 16, at most 8192, and a row of FP32 fits a
// slice.
RLK_EXPORT int rlk_gpu_all_reduce_rms_norm(const Ranks* ranks, Progress* progress, int slot, const void* partial,
                                           const void* residual, const void* weight, void* hidden, void* y, int64_t T,
                                           int64_t D, float eps, void* stream) {
  if (!is_valid(*ranks) || T < 0 || T > INT32_MAX || D <= 0 || D % 16 || D > kMostColumns) return kBadShape;
  const uint64_t row_bytes = uint64_t(D) * sizeof(float);
  if (!fits(*ranks, slot, T * row_bytes) || (slot == kNoSlot && row_bytes > ranks->slice_bytes)) return kBadShape;
  for (const void* pointer : {partial, residual, weight, static_cast<const void*>(hidden), static_cast<const void*>(y)})
    if (!is_aligned(pointer)) return kMisaligned;
  int block = kSmallestBlock;
  while (block < D) block *= 2;
  const int waves = block / (kWave * kElements), lanes = kWave * (waves < kMostWaves ? waves : kMostWaves);
  const int64_t groups = T < 1 ? 1 : T < kMostGroups ? T : kMostGroups;
  const uint32_t rows = slot == kNoSlot ? uint32_t(ranks->slice_bytes / row_bytes) : uint32_t(T / groups + 1);
  return with_world(ranks->world, [&](auto world) {
    return RLK_LAUNCH(all_reduce_norm<decltype(world)::value>, groups, lanes, stream, *ranks, progress, slot, area_of(*ranks, slot, 0),
                      static_cast<const char*>(partial), static_cast<const char*>(residual),
                      static_cast<const char*>(weight), static_cast<char*>(hidden), static_cast<char*>(y), uint32_t(T),
                      uint32_t(D), eps, lanes, rows);
  });
}
