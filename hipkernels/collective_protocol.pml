/* The generation protocol of collective_protocol.h as a Promela model, for spin; `make test-model` checks it.
 *
 * WHAT IS MODELLED. RANKS ranks make the same CALLS calls. Which ones is chosen freely: a collective in one piece or in
 * two (the second is staged where the first was), a barrier, and on GPUs one of two steps, and one that reads what a
 * GEMM wrote into direct slot 0 or 1. Then every rank closes. The numbers (1) to (6) are the header's steps. A rank is
 * one workgroup, its peers are that workgroup's namesakes: workgroups share only the order of a stream's kernels.
 *
 * SIGNALS. With PUSHED, as on GPUs, a rank stores its own generation into each peer's memory, one after the other in
 * any order, polls its own memory, hears all peers before it fails, and compares calls after reading. Without, as on
 * the host, it stores once, its peers look there, it fails at the first that does not come, and compares before
 * reading. A rank asks its peers in a fixed order: a signal never goes back, nor moves after `closed`, so what a peer
 * answers does not depend on when it is asked.
 *
 * DATA. An area has two halves, written and read one after the other: who reads while the owner writes finds another
 * generation than its own in one of them, in some interleaving. In a call of two steps `high` is the owner's part,
 * which peers read in the second step only, when it holds the sum. spin's memory is sequentially consistent: what a
 * missing release or acquire would allow is in the variants that move a step (READY_FIRST, NO_READY_WAIT, DONE_FIRST);
 * that the machine code has both is for the gates to say.
 *
 * SCENARIOS, at most one; without one no rank fails. A rank that waits for ever is an invalid end state, which spin
 * finds by itself.
 *   MISMATCH   the last rank makes one other call; every rank finds a mismatch, in that call (or, in the second step of
 *              its own call, that a peer has closed, which found it)
 *   LEAVES     the last rank closes after any call; the others learn that it has closed
 *   DIES       the last rank stops anywhere, without a word; the others run into the time-out
 *   IMPATIENT  any wait may run into the time-out; what is read is whole all the same (no slots; see LATE_SLOT)
 *
 * VARIANTS THAT MUST FAIL (tests/model names the assertion)
 *   NO_FIRST_DONE_WAIT  (1) only between a call's pieces    READY_FIRST     (3) before (2)
 *   NO_PIECE_DONE_WAIT  (1) only before a call              NO_READY_WAIT   (4) left out
 *   CALL_LATE           `call` is published after ready     DONE_FIRST      (6) before (5)
 *   NO_SECOND_LOOK      `closed` is looked at after the signal, and the signal not once more after it
 *   SLOT_REUSE          one slot in two calls in a row
 *   LATE_SLOT           IMPATIENT with slots: after a time-out the stream runs on, and its next GEMM writes a slot that
 *                       a very late peer may still read. So a time-out spoils the calls around it on that peer as well
 *   FREE_AT_ONCE        a segment is freed when its owner closes
 *   FREE_WHEN_STOPPED   .. or when its peers' kernels have closed, not when they have unmapped it (MISMATCH)
 *   STEP_IN_PLACE       the second step is staged over what peers still read in the first
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 3
#endif

#define SHORT 1    /* the calls */
#define LONG 2
#define BARRIER 3
#define TWO_STEP 4
#define SLOT_0 5
#define SLOT_1 6
#define DIRECT(what) (what >= SLOT_0)
#define STAGED(what) (what != BARRIER && !DIRECT(what))
#define PIECES(what) (what == LONG -> 2 : 1)

#define FINE 0     /* how a rank ended */
#define ALONE 1    /* a peer has closed */
#define DIFFERS 2
#define LATE 3

#define READY 0    /* the signals, and what a rank calls in its ready generation */
#define DONE 1
#define CLOSED 2
#define CALL 3
#ifdef PUSHED
#define BOX(signal, reader, writer) box[(signal * RANKS + reader) * RANKS + writer]
byte box[4 * RANKS * RANKS];
#else
#define BOX(signal, reader, writer) box[signal * RANKS + writer]
byte box[4 * RANKS];
#endif

/* An area's halves: the generation whose data they hold. Area 0 is the slice, the others are the direct slots. */
#define AREA(half, what, owner) area[(half * 3 + (DIRECT(what) -> what - SLOT_0 + 1 : 0)) * RANKS + owner]
byte area[2 * 3 * RANKS];
bool gone[RANKS];   /* this rank's host has unmapped its peers' memory, and says so in memory of the host */
bool freed[RANKS];
byte plan[CALLS];
byte odd = CALLS;  /* MISMATCH: in which call */

#define LAST (RANKS - 1)
#define NEXT ((me + 1) % RANKS)     /* the peers */
#define PREVIOUS ((me + 2) % RANKS)

#define STORE(signal, peer, value) d_step { assert(!freed[peer]); BOX(signal, peer, me) = value }
inline publish(signal, value) {
#ifndef PUSHED
  BOX(signal, me, me) = value
#else
#if RANKS == 2
  STORE(signal, NEXT, value)
#else
  if
  :: STORE(signal, NEXT, value); STORE(signal, PREVIOUS, value)
  :: STORE(signal, PREVIOUS, value); STORE(signal, NEXT, value)
  fi
#endif
#endif
}

/* In one step: nobody looks at `call` before ready. */
inline publish_call() {
  d_step {
#ifndef PUSHED
    BOX(CALL, me, me) = what
#else
    BOX(CALL, NEXT, me) = what;
#if RANKS > 2
    BOX(CALL, PREVIOUS, me) = what
#endif
#endif
  }
}

#ifdef PUSHED
#define FAILS(kind) why = kind
#else
#define FAILS(kind) why = kind; goto stopped
#endif

inline hear(peer, signal, wanted) {
  if
  :: BOX(signal, me, peer) >= wanted
#ifdef NO_SECOND_LOOK
  :: BOX(signal, me, peer) < wanted ->
       if :: BOX(CLOSED, me, peer) -> FAILS(ALONE) :: !BOX(CLOSED, me, peer) && BOX(signal, me, peer) >= wanted fi
#else
  :: BOX(CLOSED, me, peer) -> if :: BOX(signal, me, peer) >= wanted :: else -> FAILS(ALONE) fi
#endif
#ifdef DIES
  :: timeout -> FAILS(LATE)
#endif
#ifdef IMPATIENT
  :: FAILS(LATE)
#endif
  fi
}
inline hear_all(signal, wanted) {
  hear(NEXT, signal, wanted);
#if RANKS > 2
  hear(PREVIOUS, signal, wanted);
#endif
  if :: why != FINE -> goto stopped :: else fi
}

inline compare() {
  if
  :: BOX(CALL, me, NEXT) != what || (RANKS > 2 && BOX(CALL, me, PREVIOUS) != what) -> why = DIFFERS; goto stopped
  :: else
  fi
}

inline write(tag) {
  AREA(0, what, me) = tag;
  AREA(1, what, me) = tag
}
/* What is read is asserted at once, or once the calls are known to be equal. */
inline read(half) {
  d_step {
    assert(!freed[NEXT]);
    whole = whole && AREA(half, what, NEXT) == generation;
#if RANKS > 2
    assert(!freed[PREVIOUS]);
    whole = whole && AREA(half, what, PREVIOUS) == generation
#endif
  }
}
inline second_step() {
  generation++;
#ifdef STEP_IN_PLACE
  AREA(0, what, me) = generation;
#endif
  AREA(1, what, me) = generation;
  publish(READY, generation);
  hear_all(READY, generation);
  read(1)
}

#ifdef DIES
#define MAY_DIE if :: me == LAST -> goto dead :: true fi
#else
#define MAY_DIE skip
#endif
#ifdef NO_FIRST_DONE_WAIT
#define MUST_WAIT (piece > 0)
#else
#ifdef NO_PIECE_DONE_WAIT
#define MUST_WAIT (piece == 0)
#else
#define MUST_WAIT true
#endif
#endif

inline one_generation() {
  if :: MUST_WAIT -> hear_all(DONE, generation - 1) :: else fi;                    /* (1) */
  MAY_DIE;
#ifdef READY_FIRST
  publish_call();
  publish(READY, generation);
#endif
  if :: STAGED(what) -> write(generation) :: else fi;                              /* (2) */
  MAY_DIE;
#ifdef CALL_LATE
  publish(READY, generation);
  publish_call();
#else
#ifndef READY_FIRST
  publish_call();                                                                  /* (3) */
  publish(READY, generation);
#endif
#endif
#ifndef NO_READY_WAIT
  hear_all(READY, generation);                                                     /* (4) */
#ifndef PUSHED
  compare();
#endif
#endif
#ifdef DONE_FIRST
  publish(DONE, generation);
#endif
  if                                                                               /* (5) */
  :: what == BARRIER
  :: what == TWO_STEP -> read(0); second_step()
  :: else -> read(0); read(1)
  fi;
  MAY_DIE;
#if defined(PUSHED) && !defined(NO_READY_WAIT)
  compare();
#endif
  assert(whole);
#ifndef DONE_FIRST
  publish(DONE, generation)                                                        /* (6) */
#endif
}

proctype rank(byte me) {
  byte generation, calls, piece, what, why;
  bool whole = true;
  do
  :: calls == CALLS -> break
#ifdef LEAVES
  :: me == LAST -> break
#endif
  :: calls < CALLS ->
       what = (calls == odd && me == LAST -> (plan[calls] == SHORT -> LONG : SHORT) : plan[calls]);
       if :: DIRECT(what) -> write(generation + 1) :: else fi;                     /* the GEMM before it */
       piece = 0;
       do
       :: piece == PIECES(what) -> break
       :: else -> generation++; one_generation(); piece++
       od;
       calls++
  od;

stopped:
#ifdef MISMATCH
  assert(calls == odd && (why == DIFFERS || (why == ALONE && what == TWO_STEP)));
#endif
#ifdef LEAVES
  assert(why == (calls == CALLS || me == LAST -> FINE : ALONE));
#endif
#if !defined(MISMATCH) && !defined(LEAVES) && !defined(DIES) && !defined(IMPATIENT)
  assert(why == FINE && calls == CALLS);
#endif
  if
  :: why == FINE
  :: else ->
       publish(CLOSED, 1);                        /* the kernel does; what is on its stream already still runs */
       do
       :: calls >= CALLS - 1 -> break
       :: else ->
            calls++;
            what = plan[calls];
            if :: DIRECT(what) -> write(0) :: else fi
       od
  fi;
  publish(CLOSED, 1);                             /* the host does */
#ifdef PUSHED
  gone[me] = true;
#ifdef FREE_AT_ONCE
#define HAS_LEFT(peer) true
#else
#ifdef FREE_WHEN_STOPPED
#define HAS_LEFT(peer) BOX(CLOSED, me, peer)
#else
#define HAS_LEFT(peer) gone[peer]
#endif
#endif
  if
  :: HAS_LEFT(NEXT) && (RANKS == 2 || HAS_LEFT(PREVIOUS)) -> freed[me] = true
  :: else                                         /* kept; free_what_is_unmapped() of ipc_memory.py looks again */
  fi;
#endif
dead:
  skip
}

#ifdef SLOT_REUSE
#define MAY_USE(slot) true
#else
#define MAY_USE(slot) (c == 0 || plan[c - 1] != slot)
#endif
init {
  byte c;
  atomic {
    do
    :: c == CALLS -> break
    :: c < CALLS ->
         if
         :: plan[c] = SHORT
         :: plan[c] = LONG
         :: plan[c] = BARRIER
#ifdef PUSHED
         :: plan[c] = TWO_STEP
#endif
#if defined(PUSHED) && (!defined(IMPATIENT) || defined(LATE_SLOT))
         :: MAY_USE(SLOT_0) -> plan[c] = SLOT_0
         :: MAY_USE(SLOT_1) -> plan[c] = SLOT_1
#endif
         fi;
         c++
    od;
#ifdef MISMATCH
    odd = 0;
    do
    :: odd < CALLS - 1 -> odd++
    :: break
    od;
#endif
    c = 0;
    do
    :: c == RANKS -> break
    :: else -> run rank(c); c++
    od
  }
}
