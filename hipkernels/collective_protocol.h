// The generation protocol of the collectives, for the host and for GPUs.
//
// LAYOUT. Every rank owns one segment that all ranks of the group can read: a Control block, then a staging area. On a
// GPU it is one Control block and one slice of the staging area per workgroup, and each workgroup of a rank goes
// through its own generations with the workgroups of the same number on the other ranks.
//   Control   signal[kReady]   the last generation whose input this rank has staged     one cache line each: a rank
//             signal[kDone]    the last generation whose inputs this rank has read      polls a line that only its
//             signal[kClosed]  1 once this rank makes no more calls                     owner writes
//             call             what this rank calls in the ready generation; valid from ready to the last done
//   Staging   this rank's input of the ready generation; valid as long as `call`
// A rank writes its own segment only. Signals never go back and are never reset.
//
// ONE GENERATION g (a call, or one piece of a call that is larger than the staging area), on every rank:
//   1. wait until every peer's done >= g-1     nobody reads my staging area any more: it may be written again
//   2. stage the input, describe the call
//   3. release ready = g
//   4. wait until every peer's ready >= g      acquire: their staging areas are whole; compare their calls with mine
//   5. read the peers' staging areas           in an order that does not depend on who arrived first
//   6. release done = g
// No read is torn: staging of g is written between (1) and (3) of g, and read by a peer between its (4) and (6) of g,
// which (4) orders after my (3), and which my (1) of g+1 orders before the next write. No rank can be more than one
// generation ahead, so a peer's `call` in (5) is that of g. Ranks that disagree about a call all find it out in (4):
// each has published its own before it compares, and none overwrites it after.
//
// The memory model comes as a policy object:
//   uint64_t poll(const uint64_t*)                 written by any rank (system scope on a GPU)
//   void     acquire()                             what a poll has seen published may be read from here on
//   void     store_release(uint64_t*, uint64_t)
//   void     pause(uint64_t polls)                 between two polls; `polls` so far, for backing off
//   uint64_t clock_ns()                            monotonic
// On the host one thread visits the peers in turn; on a GPU one lane polls one peer, all in parallel, and a workgroup
// barrier carries what a lane has acquired to the others (and what the others have staged to the lane that publishes).
#pragma once
#include <cstdint>

#include "device.h"

namespace rlk {

constexpr uint64_t kPollsPerClock = 64;  // polls between two looks at the clock and at the peer's kClosed
constexpr int kCacheLine = 128;          // the widest among the hosts and GPUs that we run on

enum Signal : int32_t { kReady = 0, kDone = 1, kClosed = 2, kSignals = 3 };
enum Operation : int32_t { kAllReduce = 0, kAllGather = 1, kReduceScatter = 2, kBarrier = 3 };
enum FailureKind : int32_t { kNoFailure = 0, kTimedOut = 1, kPeerClosed = 2, kMismatch = 3 };

struct Call {
  int32_t operation;
  int32_t dtype;
  uint64_t count;  // elements of the whole call's input, not of the piece
};
RLK_DEVICE inline bool same_call(const Call& a, const Call& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.count == b.count;
}

struct Control {
  struct alignas(kCacheLine) Line { uint64_t value; } signal[kSignals];
  struct alignas(kCacheLine) { Call value; } call;
};

// Why a call ended badly; the host words it (rlk/collectives/shm.py has the same layout).
struct Failure {
  int32_t kind, peer, signal, reserved;
  uint64_t generation;  // the one waited for
  uint64_t seen;        // the peer's signal at that time
  Call mine, theirs;    // of a mismatch
};

// Who is waited for, and for how long at most.
struct Peer {
  const Control* control;
  int32_t rank;
  uint64_t timeout_ns;
};

// Wait until the peer's `signal` has reached `generation`. False, with the failure recorded, when it takes longer than
// the time-out or the peer has closed without reaching it.
template <class Memory>
RLK_DEVICE bool wait_for(const Memory& memory, const Peer& peer, Signal signal, uint64_t generation, Failure* failure) {
  const uint64_t* word = &peer.control->signal[signal].value;
  uint64_t deadline = 0;
  for (uint64_t polls = 1; memory.poll(word) < generation; ++polls) {
    memory.pause(polls);
    if (polls % kPollsPerClock != 0) continue;
    const uint64_t now = memory.clock_ns();
    if (deadline == 0) deadline = now + peer.timeout_ns;
    const bool closed = memory.poll(&peer.control->signal[kClosed].value) != 0;
    if (!closed && now < deadline) continue;
    memory.acquire();  // it may have arrived just before it closed: look at the signal after the closing
    const uint64_t seen = memory.poll(word);
    if (seen >= generation) break;
    *failure = Failure{closed ? kPeerClosed : kTimedOut, peer.rank, signal, 0, generation, seen, {}, {}};
    return false;
  }
  memory.acquire();
  return true;
}

// Step 1: the peer reads the staging area of the generation before this one no more.
template <class Memory>
RLK_DEVICE bool wait_until_released(const Memory& memory, const Peer& peer, uint64_t generation, Failure* failure) {
  return wait_for(memory, peer, kDone, generation - 1, failure);
}

// Step 3, after staging.
template <class Memory>
RLK_DEVICE void publish_ready(const Memory& memory, Control& mine, uint64_t generation, const Call& call) {
  mine.call.value = call;
  memory.store_release(&mine.signal[kReady].value, generation);
}

// Step 4: the peer's staging area is whole, and it is in the same call.
template <class Memory>
RLK_DEVICE bool wait_until_staged(const Memory& memory, const Peer& peer, uint64_t generation, const Call& call,
                                  Failure* failure) {
  if (!wait_for(memory, peer, kReady, generation, failure)) return false;
  const Call theirs = peer.control->call.value;
  if (same_call(call, theirs)) return true;
  *failure = Failure{kMismatch, peer.rank, kReady, 0, generation, generation, call, theirs};
  return false;
}

// Step 6, after the last read.
template <class Memory> RLK_DEVICE void publish_done(const Memory& memory, Control& mine, uint64_t generation) {
  memory.store_release(&mine.signal[kDone].value, generation);
}

// This rank makes no more calls: peers that wait for it need not wait for the time-out.
template <class Memory> RLK_DEVICE void publish_closed(const Memory& memory, Control& mine) {
  memory.store_release(&mine.signal[kClosed].value, 1);
}

}  // namespace rlk
