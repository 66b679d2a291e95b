// All-gather between GPUs of one host: bytes of any type.
//
// LAYOUT. Segments as in segment.h; out is [world][bytes], rank by rank. The input of `bytes` is cut into slices
// (cut_message); with G workgroups, b takes the slices b, b + G, ..
//
// ROLES. One generation a slice: all lanes stage it, then copy those of all ranks, whose vectors are counted through.
// Waiting and publishing: segment.h.
//
// REDUCTION ORDER. None: bytes move.
#include "gpu/transfer.h"

namespace rlk {
namespace {

// The first n bytes of v; `to` may lie anywhere.
RLK_DEVICE inline void store_bytes(char* to, const Vector16& v, uint32_t n) {
  const uint64_t unaligned = reinterpret_cast<uintptr_t>(to) | n;
  if (unaligned % kVector == 0) return store16(to, v);
  if (unaligned % sizeof(uint32_t) == 0) return store_units<uint32_t>(to, v, n);
  store_units<uint8_t>(to, v, n);
}

}  // namespace

template <int World>
__global__ void RLK_LANES(kLanes)
    all_gather(Ranks ranks, Progress* progress, int dtype, uint64_t count, Area area, uint64_t slice, const char* x,
               char* out, uint64_t bytes) {
  RLK_SHARED(Board, board);
  Exchange exchange(ranks, *progress, board, Call{kAllGather, dtype, count, kNoSlot, 0});
  const uint64_t offset = area.of_group();
  uint64_t first = group_index() * slice;
  do {
    const uint32_t n = uint32_t(bytes - first < slice ? bytes - first : slice);
    const Staging staging(x + first, n);
    if (!exchange.begin()) break;
    staging.store(board.segment[ranks.rank] + offset);
    if (!exchange.share()) break;
    // The last vector of a slice may be partly stale; only its first bytes are stored.
    const uint32_t vectors = (n + kVector - 1) / kVector;
    const auto load = [&](uint32_t i) {
      return load16(board.segment[i / vectors] + (offset + i % vectors * kVector));
    };
    for_vectors<4>(0, vectors * World, load, [&](uint32_t i, const Vector16& v) {
      const uint32_t rank = i / vectors, at = i % vectors * kVector;
      char* to = out + uint64_t(rank) * bytes + first + at;
      if (to == x + first + at) return;  // x may be its own place in out
      store_bytes(to, v, n - at < kVector ? n - at : kVector);
    });
    exchange.finish();
    first += group_count() * slice;
  } while (first < bytes);
  exchange.end();
}

}  // namespace rlk

using namespace rlk;

// out[r] = x of rank r, `count` elements of `element_size` bytes each; x may be out[rank]. The dtype's code and the
// count are only compared with the peers'.
RLK_EXPORT int rlk_gpu_all_gather(const Ranks* ranks, Progress* progress, int element_size, int dtype, const void* x,
                                  void* out, int64_t count, void* stream) {
  if (!is_valid(*ranks) || count < 0 || element_size <= 0) return kBadShape;
  if (!is_aligned(x) || !is_aligned(out)) return kMisaligned;
  const uint64_t bytes = uint64_t(count) * uint64_t(element_size);
  const Cut cut = cut_message(bytes, ranks->slice_bytes);
  return with_world(ranks->world, [&](auto world) {
    return RLK_LAUNCH(all_gather<decltype(world)::value>, cut.groups, kLanes, stream, *ranks, progress, dtype,
                      uint64_t(count), area_of(*ranks, kNoSlot, cut.slice), cut.slice, static_cast<const char*>(x),
                      static_cast<char*>(out), bytes);
  });
}
