// What the collectives between GPUs of one host share: the segment of a rank, and a workgroup's way through a
// generation of the protocol of collective_protocol.h.
//
// LAYOUT of a segment, device memory that the peers have mapped:
//   mailboxes   Control [kMostGroups][kMostRanks]   [b][s]: written by workgroup b of rank s, polled here
//   slices      [kMostGroups][slice_bytes]          the staging area of workgroup b
//   slots       [kSlots][direct_bytes]              direct staging, filled by the kernel before the collective
//   receive     [kMostGroups][2][world][2 * push_bytes]  [b][n % 2][s]: the n-th push of workgroup b of rank s
// Workgroup b of every rank uses mailboxes [b], slice b and receive areas [b] and nothing else, so it only ever waits
// for its namesakes on the other ranks. Workgroup 0 takes part in every call. Private to a rank, in its own device
// memory: Progress.
//
// ROLES. One lane serves one peer: it waits for its signals, here, and publishes this rank's to it, there. Where data
// are pulled these are the first lanes; barriers join all: what lane p has acquired all may read, what all have staged
// or read lane p publishes. Where data are pushed they are the first lanes of one more wave, so that they wait for the
// peers' calls while the others wait for the data.
//
// FAILURE. The lane that finds one records it on the board and halts the others. When its workgroup ends, the first of
// the gravest is what it has failed of: it tells the host, and closes all of this rank's mailboxes, so that the other
// workgroups, here and there, need not time out as well. A workgroup that has failed takes part in no later call.
#pragma once
#include "collective_protocol.h"
#include "gpu/gpu.h"

namespace rlk {

constexpr int kMostRanks = 8;
constexpr int kMostGroups = 128;
constexpr int kSlots = 2;
constexpr int kLanes = 256;
constexpr uint64_t kLeastSlice = 4096;  // bytes: a vector per lane
constexpr uint64_t kMostPush = 1 << 20;

// The group as one rank sees it; a kernel argument.
struct Ranks {
  char* segment[kMostRanks];
  int32_t rank, world;
  uint64_t slice_bytes, direct_bytes, push_bytes, timeout_ns;
  void* host_failure;  // a Failure in host memory that this GPU can write
};

struct alignas(kCacheLine) GroupProgress {
  uint64_t generation;  // the last one finished
  uint64_t released;    // the last one of which done was published: a pushed one does not
  uint64_t pushes;      // generations that were pushed
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

// What the lanes that serve peers tell the others, in LDS; and what is rarely read of the arguments, because the
// registers that hold these are few.
struct Board {
  uint64_t state;   // a byte per lane that serves: its LaneState
  uint32_t halted;  // not 0: a lane has failed, and nobody need wait any longer
  uint32_t late;    // 1 + the peer whose data came too late, 0 if none
  uint64_t timeout_ns;
  void* host_failure;
  char* segment[kMostRanks];
  Failure found[kMostRanks];  // of the lanes that serve
};

// The halt of collective_protocol.h, for the lanes of a workgroup.
struct GroupHalt {
  uint32_t* halted;
  RLK_DEVICE void set() const { *static_cast<volatile uint32_t*>(halted) = 1; }
  RLK_DEVICE bool is_set() const { return *static_cast<volatile uint32_t*>(halted) != 0; }
};

// Of a lane. What it has found is on the board; broken is who only knows that something was.
enum LaneState : uint8_t { kFine, kFound, kBroken };

// A workgroup's way through the generations of one call. All lanes make the same calls of its functions. Lane
// `first_server` + p serves peer p.
class Exchange {
 public:
  RLK_DEVICE Exchange(const Ranks& ranks, Progress& progress, Board& board, const Call& call, int first_server = 0)
      : progress_(progress), mine_(progress.group[group_index()]), board_(board), call_(call),
        seat_(lane_index() - first_server) {
    generation_ = mine_.generation;
    pushes_ = mine_.pushes;
    const bool serves = seat_ >= 0 && seat_ < ranks.world && seat_ != ranks.rank;
    if (lane_index() < kMostRanks) board.segment[lane_index()] = segment_of(ranks, lane_index());
    outbox_ = serves ? mailbox(segment_of(ranks, seat_), group_index(), ranks.rank) : nullptr;
    inbox_ = mailbox(segment_of(ranks, ranks.rank), group_index(), seat_);
    // Only one lane looks whether another workgroup has failed: this may change at any time, and all must see the same.
    const bool broken = mine_.failure.kind != kNoFailure || (seat_ == 0 && progress.host.reported != 0);
    const bool reused = group_index() == 0 && call.slot != kNoSlot && mine_.used_slot == call.slot + 1;
    state_ = broken || reused ? kBroken : kFine;
    if (seat_ == 0) {
      board.halted = board.late = 0;
      board.timeout_ns = ranks.timeout_ns;
      board.host_failure = ranks.host_failure;
    }
    if (seat_ >= 0 && seat_ < kMostRanks) board.found[seat_].kind = kNoFailure;
    __syncthreads();  // what is on the board may be read
    if (reused && !broken && seat_ == 0) {
      mine() = Failure{kSlotReused, ranks.rank, kReady, kNoFailure, generation_ + 1, generation_, call, call};
      state_ = kFound;
    }
  }

  // Step 1 of the next generation, after which the staging area may be written. False, in all lanes, after a failure.
  RLK_DEVICE bool begin() {
    ++generation_;
    if (outbox_ && state_ == kFine) {
      const uint64_t last = finished_ ? generation_ - 1 : mine_.released;
      note(wait_until_released(memory_, halt(), peer(), last, &mine()));
      if (state_ == kFine) describe_call(memory_, *outbox_, generation_, call_);
    }
    return all_fine();
  }

  // Steps 3 and 4, after which the peers' staging areas may be read. False, in all lanes, after a failure.
  RLK_DEVICE bool share() {
    settle_stores();
    __syncthreads();
    if (outbox_ && state_ == kFine) {
      publish_ready(memory_, *outbox_, generation_);
      note(wait_until_staged(memory_, halt(), peer(), generation_, &mine()));
    }
    return all_fine();
  }

  // A second step of the same call: share() again, without a wait for done. A peer that is in another call may know no
  // second step, so the calls are compared first.
  RLK_DEVICE bool share_again() {
    compare();
    ++generation_;
    steps_ = 1;
    return share();
  }

  // Step 6, after the last read. The calls are compared here, where it costs no time; a mismatch ends the next begin().
  // After a second step they have been, and a peer that has seen this one's may be two generations on already.
  RLK_DEVICE void finish() {
    __syncthreads();
    if (steps_ == 0) compare();
    finished_ = 1;
    steps_ = 0;
    if (outbox_ && state_ == kFine) publish_done(memory_, *outbox_, generation_);
  }

  // The beginning of a pushed generation, after which data may be pushed. False, in all lanes, after a failure.
  RLK_DEVICE bool begin_push() {
    ++generation_;
    ++pushes_;
    pushed_ = 1;
    if (outbox_ && state_ == kFine) describe_call(memory_, *outbox_, generation_, call_);
    return all_fine();
  }

  // Of a pushed generation: wait until the peer that this lane serves has described its call, and compare.
  RLK_DEVICE void hear() { compare(); }

  // Polls until arrived(), the pushed data of all peers. False once the halt is set: by another lane, or as late(), the
  // rank that has not sent all, has closed or is out of time.
  template <class Arrived, class Late> RLK_DEVICE bool wait_for_data(Arrived arrived, Late late) const {
    uint64_t deadline = 0;
    for (uint64_t polls = 1; !arrived(); ++polls) {
      memory_.pause(polls);
      if (polls % kPollsPerClock != 0) continue;
      if (halt().is_set()) return false;
      const uint64_t now = memory_.clock_ns();
      if (deadline == 0) deadline = now + board_.timeout_ns;
      const int rank = late();
      if (now < deadline && !memory_.poll(&(inbox_ - seat_ + rank)->signal[kClosed].value)) continue;
      memory_.acquire();
      if (arrived()) break;  // just before it closed
      board_.late = 1 + uint32_t(rank);
      halt().set();
    }
    return true;
  }

  // After the last read of a pushed generation: what the lanes that wait for data have found becomes a failure.
  RLK_DEVICE void finish_push() {
    __syncthreads();
    if (!outbox_ || state_ == kFound || board_.late != 1u + uint32_t(seat_)) return;
    const Signal signal = state_ == kFine ? kData : kCall;  // the call may not have come either
    const uint64_t closed = memory_.poll(&inbox_->signal[kClosed].value);
    const int32_t reason = closed ? int32_t(closed - 1) : kNoFailure;
    mine() = Failure{closed ? kPeerClosed : kTimedOut, seat_, signal, reason, generation_, generation_ - 1, {}, {}};
    note(false);
  }

  // After the last generation of the call, or a failure.
  RLK_DEVICE void end() {
    if (!all_fine()) return give_up();
    if (seat_ != 0) return;
    mine_.generation = generation_;
    if (finished_) mine_.released = generation_;
    if (pushed_) mine_.pushes = pushes_;
    mine_.used_slot = call_.slot + 1;
  }

  RLK_DEVICE uint64_t pushes() const { return pushes_; }

 private:
  RLK_DEVICE Peer peer() const { return Peer{inbox_, seat_, board_.timeout_ns}; }

  RLK_DEVICE GroupHalt halt() const { return {&board_.halted}; }
  RLK_DEVICE Failure& mine() const { return board_.found[seat_]; }

  RLK_DEVICE bool all_fine() {
    if (seat_ >= 0 && seat_ < kMostRanks) reinterpret_cast<uint8_t*>(&board_.state)[seat_] = state_;
    __syncthreads();
    const bool fine = board_.state == 0;
    if (!fine) __syncthreads();  // the end of the call, where it is written again, is next
    return fine;
  }

  RLK_DEVICE void compare() {
    if (outbox_ && state_ == kFine)
      note(compare_calls(memory_, halt(), peer(), generation_ - steps_, call_, &mine()));
  }

  // A wait may have found what it waited for after it had recorded that it would not come.
  RLK_DEVICE void note(bool fine) {
    if (mine().kind == kNoFailure) {
      if (!fine) state_ = kBroken;
      return;
    }
    state_ = kFound;
  }

  // The lane whose failure is the workgroup's, or -1: that ranks disagree comes before that one is late, or gone
  // because of it.
  RLK_DEVICE int gravest() const {
    int chosen = -1;
    for (int seat = kMostRanks - 1; seat >= 0; --seat) {
      if (reinterpret_cast<const uint8_t*>(&board_.state)[seat] != kFound) continue;
      const bool graver = chosen < 0 || board_.found[chosen].kind != kMismatch;
      if (graver || board_.found[seat].kind == kMismatch) chosen = seat;
    }
    return chosen;
  }

  // Where all ranks find the failure in their workgroup 0, that one tells the host, not a workgroup that only sees a
  // peer go because of it.
  RLK_DEVICE void give_up() {
    if (gravest() < 0) return;
    __syncthreads();
    if (outbox_ && find_disagreement(memory_, peer(), generation_ - steps_, call_, &mine())) state_ = kFound;
    all_fine();
    const int chosen = gravest();
    const Failure& failure = board_.found[chosen];
    const auto kind = FailureKind(failure.kind), why = FailureKind(failure.reason);
    const bool found_by_0 = why == kMismatch || why == kSlotReused;
    if (seat_ == chosen) {
      mine_.failure = failure;
      if ((group_index() == 0 || !found_by_0) && memory_.claim(&progress_.host.reported)) report();
    }
    if (!outbox_) return;
    Control* of_group_0 = outbox_ - group_index() * kMostRanks;
    for (int group = 0; group < kMostGroups; ++group)
      publish_closed(memory_, of_group_0[group * kMostRanks], why != kNoFailure ? why : kind);
  }

  // The first word, which holds the kind, comes last: a host that sees it sees all.
  RLK_DEVICE void report() {
    constexpr int kWords = sizeof(Failure) / sizeof(uint64_t);
    static_assert(kWords * sizeof(uint64_t) == sizeof(Failure), "a failure is copied by words");
    auto* record = static_cast<uint64_t*>(board_.host_failure);
    const auto* word = reinterpret_cast<const uint64_t*>(&mine());
    if (!record) return;
    for (int i = 1; i < kWords; ++i) record[i] = word[i];
    memory_.store_release(record, word[0]);
  }

  Progress& progress_;
  GroupProgress& mine_;
  Board& board_;
  const Call call_;
  const int seat_;  // the rank that this lane serves, if it is one of the others
  const SystemMemory memory_ = {};
  uint64_t generation_, pushes_;
  int finished_ = 0;  // 1 once this call has published done
  int pushed_ = 0;    // 1 in a call that is pushed
  int steps_ = 0;  // generations since the one in which the call was described
  Control* outbox_;  // this rank's, in the memory of the peer that this lane serves; null if it serves none
  Control* inbox_;   // that peer's, here
  LaneState state_;
};

// ---- on the host ----

// How a message is cut: workgroup b of `groups` takes the slices b, b + groups, .. of `slice` bytes.
struct Cut {
  uint64_t slice;
  int groups;
};

// Small messages spread over many workgroups, large ones over all; a slice has at most `most` bytes. All ranks cut
// alike.
inline Cut cut_message(uint64_t bytes, uint64_t most) {
  uint64_t slice = (bytes + kMostGroups - 1) / kMostGroups;
  slice = (slice + kCacheLine - 1) / kCacheLine * kCacheLine;
  slice = slice < kLeastSlice ? kLeastSlice : slice;
  slice = slice > most ? most : slice;
  const uint64_t slices = (bytes + slice - 1) / slice;
  return {slice, int(slices < 1 ? 1 : slices < kMostGroups ? slices : kMostGroups)};
}

inline bool are_valid(uint64_t slice_bytes, uint64_t direct_bytes, uint64_t push_bytes, int world) {
  return (world == 1 || world == 2 || world == 4 || world == 8) && slice_bytes > 0 && slice_bytes % kCacheLine == 0 &&
         direct_bytes % kCacheLine == 0 && push_bytes % kCacheLine == 0 && push_bytes <= kMostPush;
}
inline bool is_valid(const Ranks& ranks) {
  return are_valid(ranks.slice_bytes, ranks.direct_bytes, ranks.push_bytes, ranks.world) && ranks.rank >= 0 &&
         ranks.rank < ranks.world;
}

// Where the slots and the receive areas begin.
inline uint64_t slots_offset(uint64_t slice_bytes) { return kSlicesOffset + kMostGroups * slice_bytes; }
inline uint64_t receive_offset(uint64_t slice_bytes, uint64_t direct_bytes) {
  return slots_offset(slice_bytes) + kSlots * direct_bytes;
}

// The slices, or the slot, whose pieces of `piece` bytes the workgroups take.
inline Area area_of(const Ranks& ranks, int slot, uint64_t piece) {
  if (slot == kNoSlot) return {kSlicesOffset, ranks.slice_bytes};
  return {slots_offset(ranks.slice_bytes) + uint64_t(slot) * ranks.direct_bytes, piece};
}

// Whether `bytes` of input may lie in the slot (kNoSlot: they are staged).
inline bool fits(const Ranks& ranks, int slot, uint64_t bytes) {
  return slot == kNoSlot || (slot >= 0 && slot < kSlots && bytes <= ranks.direct_bytes);
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector16) == 0; }

}  // namespace rlk
