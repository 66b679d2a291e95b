// The generation protocol of the collectives, for the host and for GPUs.
//
// LAYOUT. A Control block is written by one rank and says how far that rank is:
//   signal[kReady]   the last generation whose input it has staged      one cache line each, so that whoever polls one
//   signal[kDone]    the last generation whose inputs it has read       is not disturbed by the others
//   signal[kClosed]  0, or 1 + the FailureKind for which it makes no more calls (kNoFailure: it just ended)
//   call             what it calls in the ready generation; valid from ready to the last done
// Signals never go back and are never reset. A rank's staging area holds its input of the ready generation and is valid
// as long as `call`. Only its owner writes it; the data are always read from there by the others.
//
// On the host the signals are pulled: a rank has one Control block, in its own segment, and its peers poll it there.
// On GPUs they are pushed: a rank has one Control block in every peer's memory, its mailbox there, and stores each
// signal into all of them, so that a peer polls its own memory and a signal is one crossing of the link away. There
// each workgroup of a rank goes through its own generations, with mailboxes and a slice of the staging area of its own,
// together with the workgroups of the same number on the other ranks (gpu/segment.h). Either way nobody publishes for
// another rank, and `control` below is where that rank writes and this one polls.
//
// ONE GENERATION g (a call, or one piece of a call that is larger than the staging area), on every rank:
//   1. wait until every peer's done >= g-1     nobody reads my staging area any more: it may be written again
//   2. stage the input, describe the call
//   3. release ready = g
//   4. wait until every peer's ready >= g      acquire: their staging areas are whole, their calls described
//   5. read the peers' staging areas           in an order that does not depend on who arrived first
//      compare their calls with mine           (before reading or after: what is read is memory of mine either way)
//   6. release done = g
// No read is torn: staging of g is written between (1) and (3) of g, and read by a peer between its (4) and (6) of g,
// which (4) orders after my (3), and which my (1) of g+1 orders before the next write. No rank can be more than one
// generation ahead, so a peer's `call` in (5) is that of g. Ranks that disagree about a call all find it out in (5):
// each has published its own before it compares, and none overwrites it after.
//
// A call of two steps, whose second reads what peers computed in the first, takes two generations g and g+1 of one
// call: between them it neither publishes done = g nor waits for it, and stages the second step where no peer reads in
// the first. Then ready = g+1 says that this is whole, and done = g+1 stands for both.
//
// DIRECT STAGING. A segment may also have direct areas (slots), which a kernel before the call fills in place of (2).
// That kernel does not wait for done. It is enough that another call lies between two uses of a slot: in that one every
// peer's ready was seen, which it published after its reads of the slot, because a rank's calls run one after another.
// The slot is part of the call, and using one in two calls in a row is a failure.
//
// The memory model comes as a policy object:
//   uint64_t poll(const uint64_t*)                 written by any rank (system scope on a GPU)
//   void     acquire()                             what a poll has seen published may be read from here on
//   void     store_release(uint64_t*, uint64_t)
//   void     pause(uint64_t polls)                 between two polls; `polls` so far, for backing off
//   uint64_t clock_ns()                            monotonic
// On the host one thread visits the peers in turn; on a GPU one lane serves one peer, all in parallel, and a workgroup
// barrier carries what a lane has acquired to the others (and what the others have staged to the lane that publishes).
#pragma once
#include <cstdint>

#include "device.h"

namespace rlk {

constexpr uint64_t kPollsPerClock = 64;  // polls between two looks at the clock and at the peer's kClosed
constexpr int kCacheLine = 128;          // the widest among the hosts and GPUs that we run on

enum Signal : int32_t { kReady = 0, kDone = 1, kClosed = 2, kSignals = 3 };
enum Operation : int32_t { kAllReduce = 0, kAllGather = 1, kReduceScatter = 2, kBarrier = 3, kAllReduceNorm = 4 };
enum FailureKind : int32_t { kNoFailure = 0, kTimedOut = 1, kPeerClosed = 2, kMismatch = 3, kSlotReused = 4 };
constexpr int32_t kNoSlot = -1;

struct Call {
  int32_t operation;
  int32_t dtype;
  uint64_t count;   // elements of the whole call's input, not of the piece
  int32_t slot;     // the direct area that holds the input, or kNoSlot
  uint32_t detail;  // what else must be equal: the route, a digest of the sizes of parts
};
RLK_DEVICE inline bool same_call(const Call& a, const Call& b) {
  return a.operation == b.operation && a.dtype == b.dtype && a.count == b.count && a.slot == b.slot &&
         a.detail == b.detail;
}

struct Control {
  struct alignas(kCacheLine) Line { uint64_t value; } signal[kSignals];
  struct alignas(kCacheLine) { Call value; } call;
};

// Why a call ended badly; the host words it (rlk/collectives/failure.py has the same layout).
struct Failure {
  int32_t kind, peer, signal;
  int32_t reason;       // of a peer that has closed: the FailureKind for which it did
  uint64_t generation;  // the one waited for
  uint64_t seen;        // the peer's signal at that time
  Call mine, theirs;    // of a mismatch, or of a slot used again
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
    const uint64_t closed = memory.poll(&peer.control->signal[kClosed].value);
    if (!closed && now < deadline) continue;
    memory.acquire();  // it may have arrived just before it closed: look at the signal after the closing
    const uint64_t seen = memory.poll(word);
    if (seen >= generation) break;
    const int32_t reason = closed ? int32_t(closed - 1) : kNoFailure;
    *failure = Failure{closed ? kPeerClosed : kTimedOut, peer.rank, signal, reason, generation, seen, {}, {}};
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

// In step 2.
RLK_DEVICE inline void describe_call(Control& mine, const Call& call) { mine.call.value = call; }

// Step 3.
template <class Memory> RLK_DEVICE void publish_ready(const Memory& memory, Control& mine, uint64_t generation) {
  memory.store_release(&mine.signal[kReady].value, generation);
}

// Step 4: the peer's staging area is whole.
template <class Memory>
RLK_DEVICE bool wait_until_staged(const Memory& memory, const Peer& peer, uint64_t generation, Failure* failure) {
  return wait_for(memory, peer, kReady, generation, failure);
}

// In step 5: the peer is in the same call.
RLK_DEVICE inline bool compare_calls(const Peer& peer, uint64_t generation, const Call& call, Failure* failure) {
  const Call theirs = peer.control->call.value;
  if (same_call(call, theirs)) return true;
  *failure = Failure{kMismatch, peer.rank, kReady, kNoFailure, generation, generation, call, theirs};
  return false;
}

// Step 6, after the last read.
template <class Memory> RLK_DEVICE void publish_done(const Memory& memory, Control& mine, uint64_t generation) {
  memory.store_release(&mine.signal[kDone].value, generation);
}

// This rank makes no more calls: peers that wait for it need not wait for the time-out.
template <class Memory>
RLK_DEVICE void publish_closed(const Memory& memory, Control& mine, FailureKind reason = kNoFailure) {
  memory.store_release(&mine.signal[kClosed].value, 1 + uint64_t(reason));
}

}  // namespace rlk
