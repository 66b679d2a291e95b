// All-reduce between GPUs of one host: pushed, in one shot or in two.
//
// LAYOUT. Segments as in segment.h. The message is cut into slices (cut_message); with G workgroups, b takes the slices
// b, b + G, ... The input of a slice is staged in b's slice of the segment; with a slot it lies in the slot already, as
// the whole message, and each workgroup has one slice of it.
//
// ROLES. Waiting and publishing: segment.h. All lanes stage, sum and copy, 128 bits at a time.
//   pushed      one generation: every rank stores its input into all peers' receive areas (push.h), and sums what it
//               finds in its own. One crossing of the link, twice the bytes: for the smallest messages.
//   one shot    one generation a slice: every rank reads the whole slice of all and sums it. Fewer waits than two.
//   two shots   two generations a slice: rank r sums the r-th of `world` parts, and leaves it where its own input of
//               that part was, which nobody else reads; then all copy the parts. Fewest bytes: for large messages.
//
// REDUCTION ORDER. That of transfer.h. In two shots each element is summed on one rank, from the same terms in the same
// order, and copied: both routes have the same bits on every rank.
#include "gpu/push.h"

namespace rlk {

namespace {

constexpr int kPushLanes = kLanes + kWave;  // the last wave serves the peers

// The parts of a piece that is reduced in two shots: `part` bytes each, of which the last may have fewer or none.
struct Parts {
  uint32_t bytes, part;
  RLK_DEVICE uint32_t begin(int rank) const { return part * rank < bytes ? part * rank : bytes; }
  RLK_DEVICE uint32_t end(int rank) const { return begin(rank + 1); }
  RLK_DEVICE int rank_of(uint32_t vector) const { return int(vector / (part / kVector)); }
};

// Sums over ranks the bytes [begin, end) of a piece, to `out` and, if kKeep, to `keep`. A vector starts at `begin`.
template <class T, int World, bool kKeep>
RLK_DEVICE inline void sum_ranks(const Places<World>& places, uint32_t begin, uint32_t end, char* out, char* keep) {
  const auto load = [&](uint32_t i) { return places.load(i * kVector); };
  const auto use = [&](uint32_t i, const Terms<World>& terms) {
    const Vector16 sum = sum_vectors<T>(terms);
    store16(out + i * kVector, sum);
    if (kKeep) store16(keep + i * kVector, sum);
  };
  for_vectors<rows_at_a_time<World>()>(begin / kVector, end / kVector, load, use);
  if (begin == end || end % kVector == 0 || lane_index() != 0) return;
  const uint32_t cut = end / kVector * kVector;
  const Vector16 sum = sum_vectors<T>(places.load(cut));
  store_units<BitsOf<T>>(out + cut, sum, end - cut);
  if (kKeep) store16(keep + cut, sum);
}

// Copies to out the parts that the other ranks have summed, of elements T.
template <class T>
RLK_DEVICE inline void gather_parts(const Board& board, int own, uint64_t offset, const Parts& parts, char* out) {
  const auto load = [&](uint32_t i) {
    const int rank = parts.rank_of(i);
    return rank == own ? Vector16() : load16(board.segment[rank] + (offset + i * kVector));
  };
  for_vectors<4>(0, parts.bytes / kVector, load, [&](uint32_t i, const Vector16& v) {
    if (parts.rank_of(i) != own) store16(out + i * kVector, v);
  });
  const uint32_t cut = parts.bytes / kVector;
  if (parts.bytes % kVector == 0 || lane_index() != 0 || parts.rank_of(cut) == own) return;
  store_units<BitsOf<T>>(out + cut * kVector, load(cut), parts.bytes % kVector);
}

}  // namespace

template <class T, int World>
__global__ void RLK_LANES(kPushLanes)
    all_reduce_pushed(Ranks ranks, Progress* progress, int slot, uint64_t receive, const char* x, char* out,
                      uint64_t bytes) {
  RLK_SHARED(Board, board);
  Exchange exchange(ranks, *progress, board, Call{kAllReduce, dtype_of<T>(), bytes / sizeof(T), slot, kPushed}, kLanes);
  const uint64_t first = uint64_t(group_index()) * kLeastSlice, mine = first + uint64_t(lane_index()) * kVector;
  const uint32_t n = uint32_t(bytes - first < kLeastSlice ? bytes - first : kLeastSlice);
  const bool carries = lane_index() < kLanes && mine < bytes;
  const uint64_t left = carries ? (bytes - mine) / sizeof(T) : 0;
  const int elements = left < kPerVector<T> ? int(left) : kPerVector<T>;
  Vector16 v RLK_UNSET;  // on its way while the workgroup begins
  if (carries) v = load_elements<T>(x + mine, elements);
  if (exchange.begin_push()) {
    const Pushing<World> pushing(ranks, exchange, receive, (n + kVector - 1) / kVector);
    if (lane_index() >= kLanes) exchange.hear();
    if (carries) {
      pushing.send(board, lane_index(), v);
      Terms<World> terms RLK_UNSET;
      const auto index = [](int) { return uint32_t(lane_index()); };
      if (pushing.template receive<1, 0, World>(board, index, &v, &terms)) {
        const Vector16 sum = sum_vectors<T>(terms);
        elements == kPerVector<T> ? store16(out + mine, sum)
                                  : store_units<BitsOf<T>>(out + mine, sum, elements * sizeof(T));
      }
    }
    exchange.finish_push();
    pushing.sweep(board);
  }
  exchange.end();
}

template <class T, int World>
__global__ void RLK_LANES(kLanes)
    all_reduce(Ranks ranks, Progress* progress, int slot, Area area, uint64_t slice, const char* x, char* out,
               uint64_t bytes) {
  RLK_SHARED(Board, board);
  Exchange exchange(ranks, *progress, board, Call{kAllReduce, dtype_of<T>(), bytes / sizeof(T), slot, kOneShot});
  const uint64_t offset = area.of_group();
  uint64_t first = group_index() * slice;
  do {  // once at least: an empty message is compared with the peers' calls as well
    const uint32_t n = uint32_t(bytes - first < slice ? bytes - first : slice);
    const Staging staging(x + first, slot == kNoSlot ? n : 0);
    if (!exchange.begin()) break;
    staging.store(board.segment[ranks.rank] + offset);
    if (!exchange.share()) break;
    sum_ranks<T, World, false>(Places<World>(board, offset), 0, n, out + first, nullptr);
    exchange.finish();
    first += group_count() * slice;
  } while (first < bytes);
  exchange.end();
}

template <class T, int World>
__global__ void RLK_LANES(kLanes) all_reduce_in_two(Ranks ranks, Progress* progress, int slot, Area area,
                                                    uint64_t slice, const char* x, char* out, uint64_t bytes) {
  RLK_SHARED(Board, board);
  Exchange exchange(ranks, *progress, board, Call{kAllReduce, dtype_of<T>(), bytes / sizeof(T), slot, kTwoShots});
  const uint64_t offset = area.of_group();
  uint64_t first = group_index() * slice;
  do {
    const uint32_t n = uint32_t(bytes - first < slice ? bytes - first : slice);
    const Parts parts = {n, (n + World * kVector - 1) / (World * kVector) * kVector};
    const Staging staging(x + first, slot == kNoSlot ? n : 0);
    if (!exchange.begin()) break;
    char* own = board.segment[ranks.rank] + offset;
    staging.store(own);
    if (!exchange.share()) break;
    sum_ranks<T, World, true>(Places<World>(board, offset), parts.begin(ranks.rank), parts.end(ranks.rank), out + first,
                              own);
    if (!exchange.share_again()) break;
    gather_parts<T>(board, ranks.rank, offset, parts, out + first);
    exchange.finish();
    first += group_count() * slice;
  } while (first < bytes);
  exchange.end();
}

}  // namespace rlk

using namespace rlk;

// out = the sum over ranks of `count` elements of x; out may be x. With a slot, the input is what lies there, and x is
// not read. A message to be pushed has at most kMostGroups x kLeastSlice bytes, and push_bytes are at least kLeastSlice.
// `ranks` is read before this returns. A failure ends up in the host's record.
RLK_EXPORT int rlk_gpu_all_reduce(const Ranks* ranks, Progress* progress, int dtype, int route, int slot, const void* x,
                                  void* out, int64_t count, void* stream) {
  return with_sum_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const uint64_t bytes = uint64_t(count) * sizeof(T);
    if (!is_valid(*ranks) || count < 0 || !fits(*ranks, slot, bytes)) return int(kBadShape);
    if (route != kOneShot && route != kTwoShots && route != kPushed) return int(kBadShape);
    if (!is_aligned(x) || !is_aligned(out)) return int(kMisaligned);
    const auto* from = static_cast<const char*>(x);
    auto* to = static_cast<char*>(out);
    return with_world(ranks->world, [&](auto world) {
      constexpr int kWorld = decltype(world)::value;
      constexpr int kSome = kWorld < 2 ? 2 : kWorld;  // one rank has nothing to share out
      if (route == kPushed && kWorld > 1) {
        const Cut cut = cut_message(bytes, kLeastSlice);
        if (bytes > kMostGroups * kLeastSlice || ranks->push_bytes < kLeastSlice) return int(kBadShape);
        if (slot != kNoSlot) from = ranks->segment[ranks->rank] + area_of(*ranks, slot, 0).offset;
        return RLK_LAUNCH((all_reduce_pushed<T, kSome>), cut.groups, kPushLanes, stream, *ranks, progress, slot,
                          receive_offset(ranks->slice_bytes, ranks->direct_bytes), from, to, bytes);
      }
      const Cut cut = cut_message(bytes, slot == kNoSlot ? ranks->slice_bytes : bytes + kCacheLine);
      const auto kernel = route == kOneShot || kWorld == 1 ? all_reduce<T, kWorld> : all_reduce_in_two<T, kSome>;
      return RLK_LAUNCH(kernel, cut.groups, kLanes, stream, *ranks, progress, slot,
                        area_of(*ranks, slot, cut.slice), cut.slice, from, to, bytes);
    });
  });
}
