// The generation protocol of the collectives, for the host and for GPUs.
//
// LAYOUT. A Control block is written by one rank and says how far that rank is:
//   signal[kReady]   the last generation whose input it has staged      one cache line each, so that whoever polls one
//   signal[kDone]    the last generation whose inputs it has read       is not disturbed by the others
//   signal[kClosed]  0, or 1 + the FailureKind for which it makes no more calls (kNoFailure: it just ended)
//   call[g % 2]      what it calls in generation g, in words that carry a tag of g each
// Signals never go back and are never reset. A rank's staging area holds its input of the ready generation and is valid
// from ready to the last done. Only its owner writes it; the others read it there.
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
// generation ahead, so in (5) a peer's call[g % 2] is that of g. Ranks that disagree about a call all find it out: in
// (5), or when the peer that they wait for has closed because of it, for it has described its call before.
//
// A call of two steps, whose second reads what peers computed in the first, takes two generations g and g+1 of one
// call, described in g: between them it neither publishes done = g nor waits for it, and stages the second step where
// no peer reads in the first. Then ready = g+1 says that this is whole, and done = g+1 stands for both.
//
// A PUSHED GENERATION g, on GPUs, for messages so small that waits and fences are what takes the time:
//   1. describe the call, and store the input into every peer's receive area of n % 2, this being the n-th generation
//      that is pushed, as 64-bit words: 32 of data, and the tag of n
//   2. poll this rank's receive area until every word of every peer carries the tag, and the peers' calls likewise;
//      compare these
// A word is stored and loaded in one piece, so what carries the tag is whole: there is nothing to fence, and one
// crossing of the link is all. Nothing is published. An area may be written again by the second push after: a rank
// makes it once it has heard every peer in the one between, where no peer speaks before it has read all of the first.
// Ready and done stay where they are; (1) of the next pulled generation waits for done of the last pulled one. Tags
// repeat after 2^31 pushes; long before, whoever owns a receive area clears it (kSweep).
//
// DIRECT STAGING. A segment may also have direct areas (slots), which a kernel before the call fills in place of (2).
// That kernel does not wait for done. It is enough that another call lies between two uses of a slot: in that one every
// peer was heard, and it spoke after its reads of the slot, because a rank's calls run one after another.
// The slot is part of the call, and using one in two calls in a row is a failure.
//
// The memory model comes as a policy object:
//   uint64_t poll(const uint64_t*)                 written by any rank (system scope on a GPU)
//   void     acquire()                             what a poll has seen published may be read from here on
//   uint64_t load(const uint64_t*)                 likewise, and orders nothing
//   void     store(uint64_t*, uint64_t)            in one piece, and orders nothing
//   void     store_release(uint64_t*, uint64_t)
//   void     pause(uint64_t polls)                 between two polls; `polls` so far, for backing off
//   uint64_t clock_ns()                            monotonic
// and, for whoever else waits for peers of this rank in the same call, a halt:
//   void     set()                                 one has failed: nobody need wait any longer
//   bool     is_set()
// On the host one thread visits the peers in turn; on a GPU one lane serves one peer, all in parallel, and a workgroup
// barrier carries what a lane has acquired to the others (and what the others have staged to the lane that publishes).
#pragma once
#include <cstdint>

#include "device.h"

namespace rlk {

constexpr uint64_t kPollsPerClock = 64;  // polls between two looks at the clock and at the peer's kClosed
constexpr int kCacheLine = 128;          // the widest among the hosts and GPUs that we run on

// Those after kSignals have no line of their own; failures name them.
enum Signal : int32_t { kReady = 0, kDone = 1, kClosed = 2, kSignals = 3, kCall = 3, kData = 4 };
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

constexpr int kCallWords = 6;
struct CallInWords {
  uint32_t word[kCallWords];
};
RLK_DEVICE inline CallInWords in_words(const Call& call) {
  return {{uint32_t(call.operation), uint32_t(call.dtype), uint32_t(call.count), uint32_t(call.count >> 32),
           uint32_t(call.slot), call.detail}};
}
RLK_DEVICE inline Call from_words(const CallInWords& in) {
  const uint32_t* word = in.word;
  return {int32_t(word[0]), int32_t(word[1]), word[2] | uint64_t(word[3]) << 32, int32_t(word[4]), word[5]};
}

struct Control {
  struct alignas(kCacheLine) Line { uint64_t value; } signal[kSignals];
  struct alignas(kCacheLine) { uint64_t word[2][kCallWords]; } call;
};

// The tag of a generation, or of a push, in the upper half of a word. Memory that nobody wrote has none.
RLK_DEVICE inline uint32_t tag_of(uint64_t generation) { return uint32_t(generation) << 1 | 1; }
RLK_DEVICE inline uint64_t tagged(uint64_t generation, uint32_t data) {
  return uint64_t(tag_of(generation)) << 32 | data;
}
RLK_DEVICE inline bool has_tag(uint64_t generation, uint64_t word) { return word >> 32 == tag_of(generation); }
// The generation of a word's tag: one at most a few before `generation`, or 0.
RLK_DEVICE inline uint64_t tagged_generation(uint64_t generation, uint64_t word) {
  return word == 0 ? 0 : generation - (tag_of(generation) - uint32_t(word >> 32)) / 2;
}
constexpr uint64_t kSweep = uint64_t(1) << 30;  // the receive areas are cleared in the pushes 0 and 1 modulo this

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

// Poll until arrived(). When it takes longer than the time-out or the peer has closed before, `failure` says so, seen()
// being how far it has come, and the halt is set. False once the halt is set, by this wait or another.
//
// A lane that has failed goes on until it sees the halt. On AMD what follows a loop is run when all lanes of the wave
// have left it: a lane that left at once could not tell the others to.
template <class Memory, class Halt, class Arrived, class Seen>
RLK_DEVICE bool wait_until(const Memory& memory, const Halt& halt, const Peer& peer, Signal signal, uint64_t generation,
                           Arrived arrived, Seen seen, Failure* failure) {
  uint64_t deadline = 0;
  for (uint64_t polls = 1; !arrived(); ++polls) {
    memory.pause(polls);
    if (polls % kPollsPerClock != 0) continue;
    if (halt.is_set()) return false;
    const uint64_t now = memory.clock_ns();
    if (deadline == 0) deadline = now + peer.timeout_ns;
    const uint64_t closed = memory.poll(&peer.control->signal[kClosed].value);
    if (!closed && now < deadline) continue;
    memory.acquire();  // it may have arrived just before it closed: look once more after the closing
    if (arrived()) break;
    const int32_t reason = closed ? int32_t(closed - 1) : kNoFailure;
    *failure = Failure{closed ? kPeerClosed : kTimedOut, peer.rank, signal, reason, generation, seen(), {}, {}};
    halt.set();
  }
  return true;
}

// Wait until the peer's `signal` has reached `generation`.
template <class Memory, class Halt>
RLK_DEVICE bool wait_for(const Memory& memory, const Halt& halt, const Peer& peer, Signal signal, uint64_t generation,
                         Failure* failure) {
  const uint64_t* word = &peer.control->signal[signal].value;
  uint64_t seen = 0;
  const auto reached = [&] { return (seen = memory.poll(word)) >= generation; };
  const bool heard = wait_until(memory, halt, peer, signal, generation, reached, [&] { return seen; }, failure);
  if (heard) memory.acquire();
  return heard;
}

// Step 1: the peer reads no more what was staged in `generation`.
template <class Memory, class Halt>
RLK_DEVICE bool wait_until_released(const Memory& memory, const Halt& halt, const Peer& peer, uint64_t generation,
                                    Failure* failure) {
  return wait_for(memory, halt, peer, kDone, generation, failure);
}

// In step 2.
template <class Memory>
RLK_DEVICE void describe_call(const Memory& memory, Control& mine, uint64_t generation, const Call& call) {
  const CallInWords in = in_words(call);
  RLK_UNROLL
  for (int i = 0; i < kCallWords; ++i)
    memory.store(&mine.call.word[generation % 2][i], tagged(generation, in.word[i]));
}

// Step 3.
template <class Memory> RLK_DEVICE void publish_ready(const Memory& memory, Control& mine, uint64_t generation) {
  memory.store_release(&mine.signal[kReady].value, generation);
}

// Step 4: the peer's staging area is whole.
template <class Memory, class Halt>
RLK_DEVICE bool wait_until_staged(const Memory& memory, const Halt& halt, const Peer& peer, uint64_t generation,
                                  Failure* failure) {
  return wait_for(memory, halt, peer, kReady, generation, failure);
}

// What the peer calls in `generation`. False when it has not described that, or not all of it.
template <class Memory>
RLK_DEVICE bool read_call(const Memory& memory, const Peer& peer, uint64_t generation, Call* call) {
  const uint64_t* words = peer.control->call.word[generation % 2];
  CallInWords in;
  bool whole = true;
  RLK_UNROLL
  for (int i = 0; i < kCallWords; ++i) {
    const uint64_t read = memory.load(&words[i]);
    whole &= has_tag(generation, read);
    in.word[i] = uint32_t(read);
  }
  *call = from_words(in);
  return whole;
}

// In step 5: the peer is in the same call, described in `generation`. After step 4 there is nothing to wait for; in a
// pushed generation this is the wait. A difference sets the halt.
template <class Memory, class Halt>
RLK_DEVICE bool compare_calls(const Memory& memory, const Halt& halt, const Peer& peer, uint64_t generation,
                              const Call& call, Failure* failure) {
  bool differs = false;
  const auto same = [&] {
    Call theirs{};
    if (differs || !read_call(memory, peer, generation, &theirs)) return false;
    if (same_call(call, theirs)) return true;
    *failure = Failure{kMismatch, peer.rank, kReady, kNoFailure, generation, generation, call, theirs};
    halt.set();
    differs = true;
    return false;
  };
  const auto seen = [&] {  // the peer's last call may be of either kind
    const uint64_t even = tagged_generation(generation, memory.load(&peer.control->call.word[0][0]));
    const uint64_t odd = tagged_generation(generation, memory.load(&peer.control->call.word[1][0]));
    return even > odd ? even : odd;
  };
  return wait_until(memory, halt, peer, kCall, generation, same, seen, failure);
}

// Whether the peer has described another call than this rank's in `generation`; the failure then says so. For a call
// that has failed: what ranks disagree about may be why.
template <class Memory>
RLK_DEVICE bool find_disagreement(const Memory& memory, const Peer& peer, uint64_t generation, const Call& call,
                                  Failure* failure) {
  Call theirs{};
  if (!read_call(memory, peer, generation, &theirs) || same_call(call, theirs)) return false;
  *failure = Failure{kMismatch, peer.rank, kReady, kNoFailure, generation, generation, call, theirs};
  return true;
}

// Step 6, after the last read.
template <class Memory> RLK_DEVICE void publish_done(const Memory& memory, Control& mine, uint64_t generation) {
  memory.store_release(&mine.signal[kDone].value, generation);
}

// This rank makes no more calls: peers that wait for it need not wait for the time-out. The first reason stays.
template <class Memory>
RLK_DEVICE void publish_closed(const Memory& memory, Control& mine, FailureKind reason = kNoFailure) {
  uint64_t* closed = &mine.signal[kClosed].value;
  if (memory.load(closed) == 0) memory.store_release(closed, 1 + uint64_t(reason));
}

}  // namespace rlk
