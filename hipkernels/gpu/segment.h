// What the collectives between GPUs of one host share: the segment of a rank, and a workgroup's way through a
// generation of the protocol of collective_protocol.h.
//
// LAYOUT of a segment, device memory that the peers have mapped:
//   mailboxes   Control [kMostGroups][kMostRanks]   [b][s]: written by workgroup b of rank s, polled here
//   slices      [kMostGroups][slice_bytes]          the staging area of workgroup b
//   slots       [kSlots][direct_bytes]              direct staging, filled by the kernel before the collective
// Workgroup b of every rank uses mailboxes [b] and slice b and nothing else, so it only ever waits for its namesakes on
// the other ranks. Workgroup 0 takes part in every call. Private to a rank, in its own device memory: Progress.
//
// ROLES. Lane p of the first wave serves peer p: it waits for its signals, here, and publishes this rank's to it, there.
// Barriers join the lanes: what lane p has acquired all may read, what all have staged or read lane p publishes.
//
// FAILURE. The lane that finds one records it; when its workgroup ends it tells the host, and closes all of this rank's
// mailboxes, so that the other workgroups, here and there, need not time out as well. A workgroup that has failed takes
// part in no later call.
#pragma once
#include "collective_protocol.h"
#include "gpu/gpu.h"

namespace rlk {

constexpr int kMostRanks = 8;
constexpr int kMostGroups = 128;
constexpr int kSlots = 2;
constexpr int kLanes = 256;
constexpr uint64_t kLeastSlice = 4096;  // bytes: a vector per lane

// The group as one rank sees it; a kernel argument.
struct Ranks {
  char* segment[kMostRanks];
  int32_t rank, world;
  uint64_t slice_bytes, direct_bytes, timeout_ns;
  void* host_failure;  // a Failure in host memory that this GPU can write
};

struct alignas(kCacheLine) GroupProgress {
  uint64_t generation;  // the last one finished
  int64_t used_slot;    // of workgroup 0: 1 + the slot of the last call, 0 if it had none
  Failure failure;      // why this workgroup takes no further part
};

struct Progress {
  struct alignas(kCacheLine) { uint64_t reported; } host;  // 1 once the host's record is taken
  GroupProgress group[kMostGroups];
};

RLK_DEVICE constexpr uint64_t kSlicesOffset = uint64_t(kMostGroups) * kMostRanks * sizeof(Control);

// Where in a segment the input of a call lies: workgroup b's from `offset` + b * `step` on.
struct Area {
  uint64_t offset, step;
  RLK_DEVICE uint64_t of_group() const { return offset + uint64_t(group_index()) * step; }
};
RLK_DEVICE inline Control* mailbox(char* segment, int group, int source) {
  return reinterpret_cast<Control*>(segment) + group * kMostRanks + source;
}
// By selection: arguments indexed by a lane's number would have to lie in memory.
RLK_DEVICE inline char* segment_of(const Ranks& ranks, int rank) {
  char* segment = ranks.segment[0];
  RLK_UNROLL
  for (int i = 1; i < kMostRanks; ++i) segment = i == rank ? ranks.segment[i] : segment;
  return segment;
}

// What the lanes that serve peers tell the others, in LDS. The addresses may be read after the first begin(); they are
// here because the registers that hold kernel arguments are few.
struct Board {
  uint64_t failed;  // a byte per lane
  char* segment[kMostRanks];
};

// Of a lane. What it has found is in its workgroup's GroupProgress; broken is who only knows that something was.
enum LaneState : int { kFine, kFound, kBroken };

// A workgroup's way through the generations of one call. All lanes make the same calls of its functions.
class Exchange {
 public:
  RLK_DEVICE Exchange(const Ranks& ranks, Progress& progress, Board& board, const Call& call)
      : ranks_(ranks), progress_(progress), mine_(progress.group[group_index()]), board_(board), call_(call) {
    const int lane = lane_index();
    generation_ = mine_.generation;
    const bool serves = lane < ranks.world && lane != ranks.rank;
    char* segment = segment_of(ranks, lane);
    if (lane < kMostRanks) board.segment[lane] = segment;
    outbox_ = serves ? mailbox(segment, group_index(), ranks.rank) : nullptr;
    inbox_ = mailbox(segment_of(ranks, ranks.rank), group_index(), lane);
    // Only lane 0 looks whether another workgroup has failed: this may change at any time, and all must see the same.
    const bool broken = mine_.failure.kind != kNoFailure || (lane == 0 && progress.host.reported != 0);
    const bool reused = group_index() == 0 && call.slot != kNoSlot && mine_.used_slot == call.slot + 1;
    state_ = broken || reused ? kBroken : kFine;
    if (reused && !broken && lane == 0) {
      mine_.failure = Failure{kSlotReused, ranks.rank, kReady, kNoFailure, generation_ + 1, generation_, call, call};
      state_ = kFound;
    }
  }

  // Step 1 of the next generation, after which the staging area may be written. False, in all lanes, after a failure.
  RLK_DEVICE bool begin() {
    ++generation_;
    if (outbox_ && state_ == kFine) {
      note(wait_until_released(memory_, peer(), generation_, &mine_.failure));
      if (state_ == kFine) describe_call(*outbox_, call_);
    }
    return all_fine();
  }

  // Steps 3 and 4, after which the peers' staging areas may be read. False, in all lanes, after a failure.
  RLK_DEVICE bool share() {
    settle_stores();
    __syncthreads();
    if (outbox_ && state_ == kFine) {
      publish_ready(memory_, *outbox_, generation_);
      note(wait_until_staged(memory_, peer(), generation_, &mine_.failure));
    }
    return all_fine();
  }

  // A second step of the same call: share() again, without a wait for done. A peer that is in another call may know no
  // second step, so the calls are compared first.
  RLK_DEVICE bool share_again() {
    if (outbox_) note(compare_calls(peer(), generation_, call_, &mine_.failure));
    ++generation_;
    return share();
  }

  // Step 6, after the last read. The calls are compared here, where it costs no time; a mismatch ends the next begin().
  RLK_DEVICE void finish() {
    __syncthreads();
    if (!outbox_) return;
    note(compare_calls(peer(), generation_, call_, &mine_.failure));
    if (state_ == kFine) publish_done(memory_, *outbox_, generation_);
  }

  // After the last generation of the call, or a failure.
  RLK_DEVICE void end() {
    if (!all_fine()) return give_up();
    if (lane_index() != 0) return;
    mine_.generation = generation_;
    mine_.used_slot = call_.slot + 1;
  }

 private:
  RLK_DEVICE Peer peer() const { return Peer{inbox_, lane_index(), ranks_.timeout_ns}; }

  RLK_DEVICE bool all_fine() {
    const int lane = lane_index();
    if (lane < kMostRanks) reinterpret_cast<uint8_t*>(&board_.failed)[lane] = state_ != kFine;
    __syncthreads();
    return board_.failed == 0;
  }

  RLK_DEVICE void note(bool fine) {
    if (!fine) state_ = kFound;
  }

  // Where all ranks find the failure in their workgroup 0, that one tells the host, not a workgroup that only sees a peer
  // go because of it.
  RLK_DEVICE void give_up() {
    const auto kind = FailureKind(mine_.failure.kind), why = FailureKind(mine_.failure.reason);
    const bool found_by_0 = why == kMismatch || why == kSlotReused;
    if (state_ == kFound && (group_index() == 0 || !found_by_0) && memory_.claim(&progress_.host.reported)) report();
    if (!outbox_ || kind == kNoFailure) return;
    Control* of_group_0 = outbox_ - group_index() * kMostRanks;
    for (int group = 0; group < kMostGroups; ++group)
      publish_closed(memory_, of_group_0[group * kMostRanks], why != kNoFailure ? why : kind);
  }

  // The first word, which holds the kind, comes last: a host that sees it sees all.
  RLK_DEVICE void report() {
    constexpr int kWords = sizeof(Failure) / sizeof(uint64_t);
    static_assert(kWords * sizeof(uint64_t) == sizeof(Failure), "a failure is copied by words");
    auto* record = static_cast<uint64_t*>(ranks_.host_failure);
    const auto* word = reinterpret_cast<const uint64_t*>(&mine_.failure);
    if (!record) return;
    for (int i = 1; i < kWords; ++i) record[i] = word[i];
    memory_.store_release(record, word[0]);
  }

  const Ranks& ranks_;
  Progress& progress_;
  GroupProgress& mine_;
  Board& board_;
  const Call call_;
  const SystemMemory memory_ = {};
  uint64_t generation_;
  Control* outbox_;  // this rank's, in the memory of the peer that this lane serves; null if it serves none
  Control* inbox_;   // that peer's, here
  int state_;
};

// ---- on the host ----

// How a message is cut: workgroup b of `groups` takes the slices b, b + groups, .. of `slice` bytes.
struct Cut {
  uint64_t slice;
  int groups;
};

// Small messages spread over many workgroups, large ones over all; a slice has at most `most` bytes. Equal on all ranks.
inline Cut cut_message(uint64_t bytes, uint64_t most) {
  uint64_t slice = (bytes + kMostGroups - 1) / kMostGroups;
  slice = (slice + kCacheLine - 1) / kCacheLine * kCacheLine;
  slice = slice < kLeastSlice ? kLeastSlice : slice;
  slice = slice > most ? most : slice;
  const uint64_t slices = (bytes + slice - 1) / slice;
  return {slice, int(slices < 1 ? 1 : slices < kMostGroups ? slices : kMostGroups)};
}

inline bool is_valid(const Ranks& ranks) {
  const int world = ranks.world;
  return (world == 1 || world == 2 || world == 4 || world == 8) && ranks.rank >= 0 && ranks.rank < world &&
         ranks.slice_bytes > 0 && ranks.slice_bytes % kCacheLine == 0 && ranks.direct_bytes % kCacheLine == 0;
}

// The slices, or the slot, whose pieces of `piece` bytes the workgroups take.
inline Area area_of(const Ranks& ranks, int slot, uint64_t piece) {
  if (slot == kNoSlot) return {kSlicesOffset, ranks.slice_bytes};
  return {kSlicesOffset + kMostGroups * ranks.slice_bytes + uint64_t(slot) * ranks.direct_bytes, piece};
}

// Whether `bytes` of input may lie in the slot (kNoSlot: they are staged).
inline bool fits(const Ranks& ranks, int slot, uint64_t bytes) {
  return slot == kNoSlot || (slot >= 0 && slot < kSlots && bytes <= ranks.direct_bytes);
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector16) == 0; }

}  // namespace rlk
