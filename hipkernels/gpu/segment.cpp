// Segments: their sizes, the barrier, and the end of a rank's part in a group.
//
// LAYOUT. Segments as in segment.h; nothing is staged.
//
// ROLES. One wave. barrier: a generation of workgroup 0, in which lane p serves peer p. close_segment: a workgroup per
// peer, whose lanes close the mailboxes of all workgroups there.
//
// REDUCTION ORDER. None.
#include "gpu/segment.h"

namespace rlk {

extern "C" __global__ void RLK_LANES(kWave) barrier(Ranks ranks, Progress* progress) {
  RLK_SHARED(Board, board);
  Exchange exchange(ranks, *progress, board, Call{kBarrier, 0, 0, kNoSlot, 0});
  if (exchange.begin() && exchange.share()) exchange.finish();
  exchange.end();
}

extern "C" __global__ void RLK_LANES(kWave) close_segment(Ranks ranks) {
  if (group_index() == ranks.rank) return;
  char* segment = segment_of(ranks, group_index());
  for (int group = lane_index(); group < kMostGroups; group += kWave)
    publish_closed(SystemMemory{}, *mailbox(segment, group, ranks.rank));
}

}  // namespace rlk

using namespace rlk;

// Bytes of a rank's segment, of its progress and of the host's failure record; all start as zeroes, before any peer
// uses them. The sizes in bytes are multiples of 128.
RLK_EXPORT int rlk_gpu_collective_bytes(int64_t slice_bytes, int64_t direct_bytes, int64_t push_bytes, int world,
                                        int64_t* segment, int64_t* progress, int64_t* failure) {
  if (slice_bytes <= 0 || direct_bytes < 0 || push_bytes < 0) return kBadShape;
  if (!are_valid(slice_bytes, direct_bytes, push_bytes, world)) return kBadShape;
  *segment = int64_t(receive_offset(slice_bytes, direct_bytes)) + 4 * push_bytes * world * kMostGroups;
  *progress = sizeof(Progress);
  *failure = sizeof(Failure);
  return kOk;
}

// Where the slot begins in a segment.
RLK_EXPORT int rlk_gpu_direct_offset(int64_t slice_bytes, int64_t direct_bytes, int slot, int64_t* offset) {
  if (slot < 0 || slot >= kSlots) return kBadShape;
  *offset = int64_t(slots_offset(slice_bytes)) + slot * direct_bytes;
  return kOk;
}

// Waits, on the stream, until every rank is here.
RLK_EXPORT int rlk_gpu_barrier(const Ranks* ranks, Progress* progress, void* stream) {
  if (!is_valid(*ranks)) return kBadShape;
  return RLK_LAUNCH(barrier, 1, kWave, stream, *ranks, progress);
}

// Tells the peers that this rank makes no more calls, in stream order.
RLK_EXPORT int rlk_gpu_close(const Ranks* ranks, void* stream) {
  if (!is_valid(*ranks)) return kBadShape;
  return RLK_LAUNCH(close_segment, ranks->world, kWave, stream, *ranks);
}
