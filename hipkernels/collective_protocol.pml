/* The generation protocol of collective_protocol.h as a Promela model, for spin; `make test-model` checks it.
 *
 * WHAT IS MODELLED. RANKS ranks make the same CALLS calls. Which ones is chosen freely: a collective in one piece or in
 * two (the second is staged where the first was), a barrier, and on GPUs one of two steps, one that is pushed, and one
 * that reads what a GEMM wrote into direct slot 0 or 1. Then every rank closes. The numbers (1) to (6) are the header's
 * steps. A rank is one workgroup, its peers are that workgroup's namesakes: workgroups share only the order of a
 * stream's kernels.
 *
 * SIGNALS. With PUSHED, as on GPUs, a rank stores its own generation into each peer's memory, one after the other in
 * any order, polls its own memory, hears all peers before it fails, and compares calls after reading. Without, as on
 * the host, it stores once, its peers look there, it fails at the first that does not come, and compares before
 * reading. A rank asks its peers in a fixed order: a signal never goes back, nor moves after `closed`, so what a peer
 * answers does not depend on when it is asked. `closed` keeps the reason that it was first given.
 *
 * CALLS. On the host a rank has one word that says what it calls. On GPUs there are two, in which the generation that
 * describes the call is the tag: a call of two steps is described, and compared, in the first.
 *
 * DATA. An area has two halves, written and read one after the other: who reads while the owner writes finds another
 * generation than its own in one of them, in some interleaving. In a call of two steps `high` is the owner's part,
 * which peers read in the second step only, when it holds the sum. spin's memory is sequentially consistent: what a
 * missing release or acquire would allow is in the variants that move a step (READY_FIRST, NO_READY_WAIT, DONE_FIRST);
 * that the machine code has both is for the gates to say.
 *
 * PUSH. Each rank has two words of either parity for what a peer sends. They hold the tag only, the number of the push,
 * by which pushes of a rank alternate between the parities: what carries it is whole by itself, and nothing is left to
 * assert. But who waits for a tag wants that very one, so a word stored too early is a hang. Two ranks store the words of a generation in any order, as nothing orders them; three store those
 * for one peer at once, for fewer states. All have arrived when the rank begins to wait: later is as if it had been
 * slower, for no word is stored anew before its reader has answered. Tags do not repeat, no area is cleared.
 *
 * SCENARIOS, at most one; without one no rank fails. A rank that waits for ever is an invalid end state, which spin
 * finds by itself.
 *   MISMATCH   the last rank makes one other call; every rank finds a mismatch, if not by itself then in the call of a
 *              peer that has closed because of one
 *   LEAVES     the last rank closes after any call; the others learn that it has closed
 *   DIES       the last rank stops anywhere, without a word; the others run into the time-out
 *   IMPATIENT  any wait may run into the time-out; what is read is whole all the same (no slots; see LATE_SLOT)
 *
 * VARIANTS THAT MUST FAIL (tests/model names the assertion, or that a rank hangs)
 *   NO_FIRST_DONE_WAIT  (1) only between a call's pieces    READY_FIRST     (3) before (2)
 *   NO_PIECE_DONE_WAIT  (1) only before a call              NO_READY_WAIT   (4) left out
 *   CALL_LATE           the call is described after ready   DONE_FIRST      (6) before (5)
 *   DONE_OF_LAST        (1) waits for generation-1, pushed or not
 *   NO_SECOND_LOOK      `closed` is looked at after the signal, and the signal not once more after it
 *   SLOT_REUSE          one slot in two calls in a row
 *   LATE_SLOT           IMPATIENT with slots: after a time-out the stream runs on, and its next GEMM writes a slot that
 *                       a very late peer may still read. So a time-out spoils the calls around it on that peer as well
 *   FREE_AT_ONCE        a segment is freed when its owner closes
 *   FREE_WHEN_STOPPED   .. or when its peers' kernels have closed, not when they have unmapped it (MISMATCH)
 *   STEP_IN_PLACE       the second step is staged over what peers still read in the first
 *   COMPARE_AGAIN       a call of two steps is compared after the second step too, when a peer that has heard this rank
 *                       there may have described a PUSH, two generations after the first, in the same word
 *   ONE_AREA            what is pushed lies in the same words in all generations
 *   EARLY_PUSH          a rank reads what was pushed to it only after it has pushed again
 *   DATA_FIRST          a PUSH waits for the data before it compares calls (MISMATCH)
 *   NO_LOOK_AT_CALL     the call of a peer that has closed is not looked at (MISMATCH)
 *   CLOSED_AGAIN        when the host closes, that replaces a kernel's reason (MISMATCH)
 *   CALL_WORDS_OF_ONE_PARITY  a call is described in the same word in all generations
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
#define PUSH 5
#define SLOT_0 6
#define SLOT_1 7
#define DIRECT(what) (what >= SLOT_0)
#define STAGED(what) (what != BARRIER && !DIRECT(what))
#define PIECES(what) (what == LONG -> 2 : 1)

#define FINE 0     /* how a rank ended */
#define ALONE 1    /* a peer has closed */
#define DIFFERS 2
#define LATE 3

#define READY 0    /* the signals */
#define DONE 1
#define CLOSED 2   /* 0, or 1 + how the rank ended */
#define CALL 3     /* what a rank calls, on GPUs in a word of each parity */
#ifdef PUSHED
#define DATA 5     /* the tags of what was pushed, in two words of each parity */
#define BOX(signal, reader, writer) box[((signal) * RANKS + reader) * RANKS + writer]
byte box[9 * RANKS * RANKS];
#define THIS_CALL (described * 8 + what)
#ifdef CALL_WORDS_OF_ONE_PARITY
#define CALL_WORD CALL
#else
#define CALL_WORD (CALL + described % 2)
#endif
#else
#define BOX(signal, reader, writer) box[signal * RANKS + writer]
byte box[4 * RANKS];
#define THIS_CALL what
#define CALL_WORD CALL
#endif
/* An area's halves: the generation whose data they hold. Area 0 is the slice, the others are the direct slots. */
#define AREA(half, what, owner) area[(half * 3 + (DIRECT(what) -> what - SLOT_0 + 1 : 0)) * RANKS + owner]
byte area[2 * 3 * RANKS];
bool gone[RANKS];   /* this rank's host has unmapped its peers' memory, and says so in memory of the host */
bool freed[RANKS];
byte plan[CALLS];   /* 0: not chosen yet */
byte odd = CALLS;  /* MISMATCH: in which call */
bool slot_used;

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

#ifdef PUSHED
#define FAILS(kind) why = kind
#else
#define FAILS(kind) why = kind; goto stopped
#endif

/* What a peer's closing means. Should one mean DIFFERS and another ALONE, the rank ends with ALONE. */
#if defined(PUSHED) && !defined(NO_LOOK_AT_CALL)
#define SAYS(peer) BOX(CALL_WORD, me, peer)
#define DISAGREES(peer) (BOX(CLOSED, me, peer) == 1 + DIFFERS && SAYS(peer) / 8 == described && SAYS(peer) != THIS_CALL)
#define HAS_CLOSED(peer) FAILS((DISAGREES(peer) && why != ALONE -> DIFFERS : ALONE))
#else
#define HAS_CLOSED(peer) FAILS(ALONE)
#endif

/* `there` says whether what the peer is waited for has come. */
inline hear(peer, there) {
  if
  :: there
#ifdef NO_SECOND_LOOK
  :: !(there) -> if :: BOX(CLOSED, me, peer) -> FAILS(ALONE) :: !BOX(CLOSED, me, peer) && there fi
#else
  :: BOX(CLOSED, me, peer) -> if :: there :: else -> HAS_CLOSED(peer) fi
#endif
#ifdef DIES
  :: timeout -> FAILS(LATE)
#endif
#ifdef IMPATIENT
  :: FAILS(LATE)
#endif
  fi
}
#define GO_ON if :: why != FINE -> goto stopped :: else fi
#if RANKS > 2
#define HEAR_ALL(there) hear(NEXT, there(NEXT)); hear(PREVIOUS, there(PREVIOUS)); GO_ON
#else
#define HEAR_ALL(there) hear(NEXT, there(NEXT)); GO_ON
#endif

#ifdef DONE_OF_LAST
#define RELEASED(peer) BOX(DONE, me, peer) >= generation - 1
#else
#define RELEASED(peer) BOX(DONE, me, peer) >= pulled
#endif
#define IS_READY(peer) BOX(READY, me, peer) >= generation

inline compare() {
  if
  :: BOX(CALL_WORD, me, NEXT) != THIS_CALL || (RANKS > 2 && BOX(CALL_WORD, me, PREVIOUS) != THIS_CALL) ->
       why = DIFFERS; goto stopped
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
  HEAR_ALL(IS_READY);
  read(1)
}

#ifdef DIES
#define MAY_DIE if :: me == LAST -> goto dead :: true fi
#else
#define MAY_DIE skip
#endif
#ifdef COMPARE_AGAIN
#define IS_COMPARED false
#else
#define IS_COMPARED (what == TWO_STEP)
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
  if :: MUST_WAIT -> HEAR_ALL(RELEASED) :: else fi;                                /* (1) */
  MAY_DIE;
#ifdef READY_FIRST
  publish(CALL_WORD, THIS_CALL);
  publish(READY, generation);
#endif
  if :: STAGED(what) -> write(generation) :: else fi;                              /* (2) */
  MAY_DIE;
#ifdef CALL_LATE
  publish(READY, generation);
  publish(CALL_WORD, THIS_CALL);
#else
#ifndef READY_FIRST
  publish(CALL_WORD, THIS_CALL);
  publish(READY, generation);                                                      /* (3) */
#endif
#endif
#ifndef NO_READY_WAIT
  HEAR_ALL(IS_READY);                                                              /* (4) */
#ifndef PUSHED
  compare();
#endif
#endif
#ifdef DONE_FIRST
  publish(DONE, generation);
#endif
  if                                                                               /* (5) */
  :: what == BARRIER
  :: what == TWO_STEP -> read(0); compare(); second_step()
  :: else -> read(0); read(1)
  fi;
  MAY_DIE;
#if defined(PUSHED) && !defined(NO_READY_WAIT)
  if :: IS_COMPARED :: else -> compare() fi;
#endif
  assert(whole);
#ifndef DONE_FIRST
  publish(DONE, generation);                                                       /* (6) */
#endif
  pulled = generation
}

#ifdef PUSHED
#ifdef ONE_AREA
#define WORD(half, of) (DATA + half)
#else
#define WORD(half, of) (DATA + 2 * half + (of) % 2)
#endif
#define SEND(signal, peer, value) assert(!freed[peer]); BOX(signal, peer, me) = value
#if RANKS == 2
#define ONCE(n, signal, value) d_step { !(sent & (1 << n)); SEND(signal, NEXT, value); sent = sent | (1 << n) }
inline send() {
  do
  :: ONCE(0, CALL_WORD, THIS_CALL)
  :: ONCE(1, WORD(0, pushes), pushes)
  :: ONCE(2, WORD(1, pushes), pushes)
  :: d_step { sent == 7 -> sent = 0 } -> break
#ifdef DIES
  :: me == LAST -> goto dead
#endif
  od
}
#else
#define SEND_ALL(peer) \
  d_step { \
    SEND(CALL_WORD, peer, THIS_CALL); \
    SEND(WORD(0, pushes), peer, pushes); \
    SEND(WORD(1, pushes), peer, pushes) \
  }
inline send() {
  if
  :: SEND_ALL(NEXT); MAY_DIE; SEND_ALL(PREVIOUS)
  :: SEND_ALL(PREVIOUS); MAY_DIE; SEND_ALL(NEXT)
  fi
}
#endif

#ifdef EARLY_PUSH
#define READS (pushes - 1)
#define MUST_READ (READS > 0)
#else
#define READS pushes
#define MUST_READ true
#endif
#define DESCRIBED(peer) BOX(CALL_WORD, me, peer) / 8 == described
#define CAME_0(peer) BOX(WORD(0, READS), me, peer) == READS
#define CAME_1(peer) BOX(WORD(1, READS), me, peer) == READS

inline push() {
  pushes++;
  send();
#ifndef DATA_FIRST
  HEAR_ALL(DESCRIBED);
  compare();
#endif
  if :: MUST_READ -> HEAR_ALL(CAME_0); HEAR_ALL(CAME_1) :: else fi;
#ifdef DATA_FIRST
  HEAR_ALL(DESCRIBED);
  compare();
#endif
  MAY_DIE
}
#else
#define push() skip
#endif

/* Who comes to a call first chooses it. Slots are alike: slot 0 is used first. After the odd call only GEMMs matter. */
#ifdef SLOT_REUSE
#define MAY_USE(slot) true
#else
#define MAY_USE(slot) (calls == 0 || plan[calls - 1] != slot)
#endif
inline choose() {
  atomic {
    if
    :: plan[calls] == 0 ->
         if
         :: plan[calls] = BARRIER
         :: calls <= odd -> plan[calls] = SHORT
         :: calls <= odd -> plan[calls] = LONG
#ifdef PUSHED
         :: calls <= odd -> plan[calls] = TWO_STEP
         :: calls <= odd -> plan[calls] = PUSH
#endif
#if defined(PUSHED) && (!defined(IMPATIENT) || defined(LATE_SLOT))
         :: MAY_USE(SLOT_0) -> plan[calls] = SLOT_0; slot_used = true
         :: MAY_USE(SLOT_1) && slot_used -> plan[calls] = SLOT_1
#endif
         fi
    :: else
    fi;
    what = plan[calls];
#ifdef MISMATCH
    if
    :: calls == odd && me == LAST ->
         if
         :: what != SHORT -> what = SHORT
         :: what != LONG -> what = LONG
#ifdef PUSHED
         :: what != TWO_STEP -> what = TWO_STEP
         :: what != PUSH -> what = PUSH
#endif
         fi
    :: else
    fi
#endif
  }
}

proctype rank(byte me) {
  byte generation, calls, piece, what, why;
  byte described;   /* the generation that describes this call, or this piece of it */
  byte pulled;      /* the last generation that was not pushed */
  byte pushes;      /* how many were: the tag of what is pushed */
  byte sent;
  bool whole = true;
  do
  :: calls == CALLS -> break
#ifdef LEAVES
  :: me == LAST -> break
#endif
  :: calls < CALLS ->
       choose();
       if :: DIRECT(what) -> write(generation + 1) :: else fi;                     /* the GEMM before it */
       piece = 0;
       do
       :: piece == PIECES(what) -> break
       :: else ->
            generation++;
            described = generation;
            if :: what == PUSH -> push() :: else -> one_generation() fi;
            piece++
       od;
       calls++
  od;

stopped:
#ifdef MISMATCH
  assert(calls == odd && why == DIFFERS);
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
       publish(CLOSED, 1 + why);                  /* the kernel does; what is on its stream already still runs */
       do
       :: calls >= CALLS - 1 -> break
       :: else ->
            calls++;
            choose();
            if :: DIRECT(what) -> write(0) :: else fi
       od
  fi;
#ifdef CLOSED_AGAIN
  publish(CLOSED, 1 + FINE);
#else
  publish(CLOSED, 1 + why);                       /* the host does, and leaves a kernel's reason */
#endif
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

init {
  byte c;
  atomic {
#ifdef MISMATCH
    odd = 0;
    do
    :: odd < CALLS - 1 -> odd++
    :: break
    od;
#endif
    do
    :: c == RANKS -> break
    :: else -> run rank(c); c++
    od
  }
}
