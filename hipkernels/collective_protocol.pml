/* The generation protocol of collective_protocol.h as a Promela model, for spin. `make test-model` checks it.
 *
 * RANKS ranks make CALLS calls, one generation each. The calls alternate between an all-reduce and an all-gather, whose
 * staging areas are the same memory. A staging area has two halves, written and read one after the other: whoever reads
 * while its owner writes sees two generations, or one that is not the current. The numbers of the steps are those of
 * the header. Peers are visited in any order, since on a GPU one lane polls one peer.
 *
 * spin finds by itself that some rank waits for ever (an invalid end state). What must be whole is asserted at (5).
 * -DNO_DONE_WAIT leaves step (1) out; -DPUBLISH_EARLY puts step (3) before step (2). Both must fail.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 4
#endif
#define REDUCE(g) (g % 2)

byte ready_of[RANKS];
byte done_of[RANKS];
byte call[RANKS];   /* what a rank calls in its ready generation */
byte low[RANKS];    /* the staging area's halves: the generation whose data they hold */
byte high[RANKS];

#define ALL ((1 << RANKS) - 1)
#define ARRIVES(signal, k) :: !(seen & (1 << k)) && signal[k] >= wanted -> seen = seen | (1 << k)
#if RANKS > 2
#define ARRIVES_2(signal) ARRIVES(signal, 2)
#else
#define ARRIVES_2(signal)
#endif

inline wait_until_all_ready(wanted) {
  seen = 0;
  do
  :: seen == ALL -> break
  ARRIVES(ready_of, 0)
  ARRIVES(ready_of, 1)
  ARRIVES_2(ready_of)
  od
}

inline wait_until_all_done(wanted) {
  seen = 0;
  do
  :: seen == ALL -> break
  ARRIVES(done_of, 0)
  ARRIVES(done_of, 1)
  ARRIVES_2(done_of)
  od
}

proctype rank(byte me) {
  byte generation = 1, peer, seen, first;
  do
  :: generation > CALLS -> break
  :: else ->
#ifndef NO_DONE_WAIT
       wait_until_all_done(generation - 1);           /* (1) nobody reads my staging area any more */
#endif
#ifdef PUBLISH_EARLY
       ready_of[me] = generation;
#endif
       call[me] = REDUCE(generation);                 /* (2) */
       low[me] = generation;
       high[me] = generation;
#ifndef PUBLISH_EARLY
       ready_of[me] = generation;                        /* (3) */
#endif
       wait_until_all_ready(generation);              /* (4) */
       peer = 0;
       do
       :: peer == RANKS -> break
       :: else ->                                     /* (5) */
            assert(call[peer] == REDUCE(generation));
            first = low[peer];
            assert(first == generation);
            assert(high[peer] == generation);
            peer++
       od;
       done_of[me] = generation;                         /* (6) */
       generation++
  od
}

init {
  byte k = 0;
  atomic {
    do
    :: k == RANKS -> break
    :: else -> run rank(k); k++
    od
  }
}
