// torch.cumsum along rows of FP32, bit for bit, where torch scans a row with 512 lanes (ops/cumulative_sum.py says when).
//
// Layout: in and out are [rows, columns], row-major, cut into tiles of 1024 columns; what the last one lacks is zero.
//
// torch's order: a tile's first element is x[0] + (the sum before the tile). Then ten levels: at level m, the upper half
// of every run of 2**(m+1) elements adds the last element of the lower half. So an element i of [2**m, 2**(m+1)) gets
// everything within that run first, in levels 0 .. m-1: its SUBTREE, which no other tile touches. Level m adds the last
// element before the run, and later levels nothing. Those last elements, at 0, 1, 3, 7, .. 1023, are the left SPINE:
//     spine[0] = x[0] + carry,  spine[m+1] = subtree[2**(m+1) - 1] + spine[m],  the next carry = spine[10]
// so only these eleven additions a tile are one after another.
//
//   scan_subtrees  all tiles at once: every element's subtree to `out`, each run's last also to `runs` [rows, tiles, 16]
//   scan_spine     one lane a row: runs[0] becomes spine[0], runs[m] spine[m], tile after tile
//   scan_prefixes  all tiles at once: out[i] = out[i] + spine[m]
#include "gpu/gpu.h"

namespace rlk {
namespace {

constexpr int kLanes = 256, kTile = 1024, kLevels = 10;
constexpr int kRuns = 16;                          // floats of a tile's spine, padded to whole sectors
constexpr int64_t kMostTiles = int64_t(1) << 23;   // a HIP grid holds fewer than 2**32 lanes
constexpr int kPairs = kTile / 2 / kLanes;         // additions of a lane at each level
constexpr int kBatch = 256;                        // tiles of a row that scan_spine has in LDS at a time

struct Tile {
  float x[kTile];
};

struct alignas(16) Runs {
  float end[kRuns];  // 0 to kLevels are used
};

struct Spine {
  Runs tile[kBatch];
};

// The run of an element within its tile: -1 for the first one, else m with 2**m <= i < 2**(m+1).
RLK_DEVICE inline int run_of(int i) { return i == 0 ? -1 : 31 - __builtin_clz(uint32_t(i)); }

}  // namespace

extern "C" __global__ void RLK_LANES(kLanes)
    scan_subtrees(const float* in, int64_t columns, int tiles, float* out, float* runs) {
  RLK_SHARED(Tile, tile);
  const int lane = lane_index();
  const int64_t row = group_index() / tiles, first = int64_t(group_index() % tiles) * kTile;
  const float* from = in + row * columns + first;
  float* to = out + row * columns + first;
  const int count = columns - first < kTile ? int(columns - first) : kTile;
  RLK_UNROLL
  for (int i = lane; i < kTile; i += kLanes) tile.x[i] = i < count ? from[i] : 0.0f;
  __syncthreads();
  // Without the left-most run of each level: its turn comes with the carry.
  for (int level = 0; level < kLevels - 1; ++level) {
    const int half = 1 << level;
    RLK_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      const int pair = p * kLanes + lane;
      const int last = (pair >> level << (level + 1)) + half - 1, i = last + 1 + (pair & (half - 1));
      if (i >= 2 * half) tile.x[i] = tile.x[i] + tile.x[last];
    }
    __syncthreads();
  }
  RLK_UNROLL
  for (int i = lane; i < kTile; i += kLanes)
    if (i < count) to[i] = tile.x[i];
  if (lane < kRuns) runs[int64_t(group_index()) * kRuns + lane] = lane <= kLevels ? tile.x[(1 << lane) - 1] : 0.0f;
}

extern "C" __global__ void RLK_LANES(kLanes) scan_spine(int tiles, float* runs) {
  RLK_SHARED(Spine, spine);
  const int lane = lane_index();
  float* row = runs + int64_t(group_index()) * tiles * kRuns;
  float carry = 0.0f;
  for (int first = 0; first < tiles; first += kBatch) {
    const int count = tiles - first < kBatch ? tiles - first : kBatch;
    for (int i = lane; i < count * kRuns; i += kLanes) spine.tile[i / kRuns].end[i % kRuns] = row[first * kRuns + i];
    __syncthreads();
    if (lane == 0) {
      for (int t = 0; t < count; ++t) {
        Runs& now = spine.tile[t];
        RLK_UNROLL
        for (int m = 0; m <= kLevels; ++m) now.end[m] = carry = now.end[m] + carry;
      }
    }
    __syncthreads();
    for (int i = lane; i < count * kRuns; i += kLanes) row[first * kRuns + i] = spine.tile[i / kRuns].end[i % kRuns];
    __syncthreads();
  }
}

extern "C" __global__ void RLK_LANES(kLanes) scan_prefixes(int64_t columns, int tiles, const float* runs, float* out) {
  const int lane = lane_index();
  const int64_t row = group_index() / tiles, first = int64_t(group_index() % tiles) * kTile;
  float* to = out + row * columns + first;
  const int count = columns - first < kTile ? int(columns - first) : kTile;
  const float* spine = runs + int64_t(group_index()) * kRuns;
  RLK_UNROLL
  for (int i = lane; i < kTile; i += kLanes)
    if (i < count) to[i] = i == 0 ? spine[0] : to[i] + spine[run_of(i)];
}

}  // namespace rlk

using namespace rlk;

// out = torch.cumsum(in, 1), as torch computes it with 512 lanes a row. runs is [rows, ceil(columns / 1024), 16] floats.
RLK_EXPORT int rlk_gpu_cumulative_sum(const float* in, int64_t rows, int64_t columns, float* out, float* runs,
                                      void* stream) {
  const int64_t tiles = (columns + kTile - 1) / kTile;
  if (rows < 0 || columns < 0 || (columns && rows > kMostTiles / tiles)) return kBadShape;
  if (rows == 0 || columns == 0) return kOk;
  int code = RLK_LAUNCH(scan_subtrees, rows * tiles, kLanes, stream, in, columns, int(tiles), out, runs);
  if (code == kOk) code = RLK_LAUNCH(scan_spine, rows, kLanes, stream, int(tiles), runs);
  const float* spines = runs;
  if (code == kOk)
    code = RLK_LAUNCH(scan_prefixes, rows * tiles, kLanes, stream, columns, int(tiles), spines, out);
  return code;
}
