// Reduce-scatter between GPUs of one host, of one tensor or of many in one launch.
//
// LAYOUT. Segments as in segment.h. Each part is x [world][count], of whose sum over ranks this rank gets its [count].
// The parts' [count] lie behind each other, each from a whole vector on; this row of vectors is cut into slices
// (cut_message), and with G workgroups b takes the slices b, b + G, ... A slice is staged for every rank: `world` times
// `slice` bytes, rank after rank.
//
// ROLES. One generation a slice: all lanes stage it, then sum what the ranks have staged for this one. Waiting and
// publishing: segment.h.
//
// REDUCTION ORDER. That of transfer.h.
#include "gpu/transfer.h"

namespace rlk {

constexpr int kMostParts = 16;

struct Part {
  const void* x;
  void* out;
  int64_t count;  // elements per rank
};

// The parts, as a kernel argument and in LDS.
struct Parts {
  const char* x[kMostParts];
  char* out[kMostParts];
  uint64_t count[kMostParts];
  uint64_t first[kMostParts + 1];  // vectors of the parts before this one; from the last on, of all
};

namespace {

// Where a vector of the row lies.
struct Position {
  int part;
  uint64_t element;  // within [count]
  int elements;      // of the vector that there are
};

template <class T> RLK_DEVICE inline Position position_of(const Parts& parts, uint64_t vector) {
  int part = 0;
  while (vector >= parts.first[part + 1]) ++part;
  const uint64_t element = (vector - parts.first[part]) * kPerVector<T>;
  const uint64_t left = parts.count[part] - element;
  return {part, element, left < kPerVector<T> ? int(left) : kPerVector<T>};
}

}  // namespace

template <class T, int World>
__global__ void RLK_LANES(kLanes)
    reduce_scatter(Ranks ranks, Progress* progress, Parts arguments, uint64_t count, uint32_t sizes, Area area,
                   uint64_t slice) {
  RLK_SHARED(Board, board);
  RLK_SHARED(Parts, parts);
  if (lane_index() == 0) parts = arguments;
  Exchange exchange(ranks, *progress, board, Call{kReduceScatter, dtype_of<T>(), count, kNoSlot, sizes});
  const uint64_t all = arguments.first[kMostParts];
  const uint32_t per_slice = uint32_t(slice / kVector);
  uint64_t first = uint64_t(group_index()) * per_slice;
  do {
    const uint32_t n = uint32_t(all - first < per_slice ? all - first : per_slice);
    if (!exchange.begin()) break;
    char* staging = board.segment[ranks.rank] + area.of_group();
    const auto load_mine = [&](uint32_t i) {
      const Position at = position_of<T>(parts, first + i);
      Terms<World> of_ranks;
      RLK_UNROLL
      for (int rank = 0; rank < World; ++rank)
        of_ranks.of_rank[rank] = load_elements<T>(
            parts.x[at.part] + (rank * parts.count[at.part] + at.element) * sizeof(T), at.elements);
      return of_ranks;
    };
    for_vectors<1>(0, n, load_mine, [&](uint32_t i, const Terms<World>& of_ranks) {
      RLK_UNROLL
      for (int rank = 0; rank < World; ++rank) store16(staging + rank * slice + i * kVector, of_ranks.of_rank[rank]);
    });
    if (!exchange.share()) break;
    const Places<World> places(board, area.of_group() + ranks.rank * slice);
    const auto load = [&](uint32_t i) { return places.load(i * kVector); };
    for_vectors<rows_at_a_time<World>()>(0, n, load, [&](uint32_t i, const Terms<World>& terms) {
      const Position at = position_of<T>(parts, first + i);
      char* out = parts.out[at.part] + at.element * sizeof(T);
      const Vector16 sum = sum_vectors<T>(terms);
      at.elements == kPerVector<T> ? store16(out, sum) : store_units<BitsOf<T>>(out, sum, at.elements * sizeof(T));
    });
    exchange.finish();
    first += uint64_t(group_count()) * per_slice;
  } while (first < all);
  exchange.end();
}

}  // namespace rlk

using namespace rlk;

// parts[i].out = this rank's [count] of the sum over ranks of parts[i].x, [world * count]. 1 to kMostParts parts.
RLK_EXPORT int rlk_gpu_reduce_scatter(const Ranks* ranks, Progress* progress, int dtype, const Part* parts, int n,
                                      void* stream) {
  return with_sum_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!is_valid(*ranks) || n < 1 || n > kMostParts) return int(kBadShape);
    const int world = ranks->world;
    Parts arguments = {};
    uint64_t vectors = 0, count = 0;
    uint32_t sizes = 2166136261u;  // FNV-1a over the counts
    for (int i = 0; i < n; ++i) {
      if (parts[i].count < 0) return int(kBadShape);
      if (!is_aligned(parts[i].x) || !is_aligned(parts[i].out)) return int(kMisaligned);
      arguments.x[i] = static_cast<const char*>(parts[i].x);
      arguments.out[i] = static_cast<char*>(parts[i].out);
      arguments.count[i] = uint64_t(parts[i].count);
      count += arguments.count[i] * world;
      vectors += (arguments.count[i] + kPerVector<T> - 1) / kPerVector<T>;
      arguments.first[i + 1] = vectors;
      for (int byte = 0; byte < 8; ++byte) sizes = (sizes ^ (arguments.count[i] >> 8 * byte & 255)) * 16777619u;
    }
    for (int i = n; i < kMostParts; ++i) arguments.first[i + 1] = vectors;
    const Cut cut = cut_message(vectors * kVector, ranks->slice_bytes / world / kVector * kVector);
    return with_world(world, [&](auto constant) {
      return RLK_LAUNCH((reduce_scatter<T, decltype(constant)::value>), cut.groups, kLanes, stream, *ranks, progress,
                        arguments, count, sizes, area_of(*ranks, kNoSlot, cut.slice), cut.slice);
    });
  });
}
