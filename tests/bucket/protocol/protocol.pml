/* The protocol of FORMAT.md as a model that spin searches to the end. test_spin_model.py names the configurations and runs it;
 * numbers in comments are FORMAT.md's steps, I1 to I10 its invariants.
 *
 * What there is: `latest` (L), written by compare-and-swap only; driver 1 with coordinators 0 and 1 (Ray restarts it: 1
 * begins without memory while 0, which reaches no rank any more, goes on with whatever it has begun) and worker groups 0
 * and 1; driver 2 with coordinator 2 and group 2; a rewind from outside (coordinator 4). Every request to the store, and
 * every pause before one, is a step that all others may come between. A swap is applied, refused, applied with its answer
 * lost, or hangs in the network and lands later; after an unknown outcome the caller asks again or gives up. A group may
 * die at any time; its ranks may go on writing and reporting. Anybody prunes and sweeps, with however old a view.
 *
 * Bounds: 3 coordinators, 3 groups, so 3 attempts (4 with a rewind); S saves per attempt, INFLIGHT of them at a time; FAULTS
 * lost or late answers; KILLS deaths of group 0; one sweep, one pin, one loss of `latest`, one reader. Which of them are
 * there together is said in test_spin_model.py.
 *
 * Abstractions: a version of L is a bit per process, "nothing was written since I read": exact, since the counter keeps
 * bodies from repeating (2). A directory's number holds attempt and save, so the order of commits is that of numbers. An
 * object is a bit, as bytes are a pure function of who writes them (16), but where that is what a rule is about (TRACK,
 * INDEX). Two ranks are two halves written in order. A grace for readers is comfort and no rule here: deletes may follow
 * at once. Not there: time, roll-back of L to an older body, repair, forks, exports, partial restores, more attempts than
 * L lists, faults of GET, PUT of data and DELETE other than a process that stops.
 *
 * -DWITHOUT=<rule> takes one rule away; spin must then find a violation. Rules that the checker does not miss, so that they
 * are none here: that a commit checks the coordinator (the numbers of saves and the effect are enough within the bounds),
 * the listing before a claim (the one after it is enough; the one before keeps a lost L from being written over), a sweep
 * that reads L only after it listed, a sweep that spares `evicted` (both dead for ever: comfort for readers), and that
 * retention spares the head (the head is the newest in every commit).
 */
#define CAS         1   /* 3   PUT only onto the version that was read */
#define EFFECT      2   /* 4   judge an unknown outcome by effect */
#define RECOMPUTE   3   /* 2   an old decision is never sent again */
#define SEEN        4   /* 4   who has seen L never creates it again, nor takes another run's for it */
#define OWNERS      5   /* 9   an owner that is listed but not current is fenced for good */
#define PROVEN      6   /* 10  an attempt counts only once its listing has found nothing */
#define SOFT        7   /* 28  the same owner's newer attempt or coordinator ends the attempt, not the run */
#define PROOF       8   /* 16  commit only with all ranks' reports */
#define KEY         9   /* 13  a directory's name has the number of the save */
#define PURE        10  /* 16  manifest and index are a pure function of the reports */
#define ATTEMPT     11  /* 17  commit only in the attempt that L names */
#define LAST        12  /* 15  commit only a higher save than the last */
#define REFS        13  /* 17  commit only what refers to directories that are held */
#define LEAVE       14  /* 18  a failed save leaves its objects lying */
#define EVICT_FIRST 15  /* 19  the swap comes before the deletes */
#define HELD        16  /* 20  what a live entry refers to is not deleted */
#define LOWER       17  /* 23  sweep only attempts lower than L's */
#define REFUSE      18  /* 22  sweep nothing when there is a directory of an attempt that L does not know */
#define REREAD      19  /* 25  a missing object is damage only if its checkpoint is still live */
#define MOVED       20  /* 31  a rewind whose owner is listed was applied, whoever came after it */
#define NAMED       21  /* 40  pages of owners that were read before serve only a body that names them */
#ifndef WITHOUT
#define WITHOUT 0
#endif
#define ON(rule) (WITHOUT != rule)

#ifndef S
#define S 1
#endif
#ifndef KEEP
#define KEEP 1
#endif
#ifndef INFLIGHT
#define INFLIGHT 1
#endif
#ifndef FAULTS
#define FAULTS 0
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifdef REWIND
#define NKEYS (4 * S)
#else
#define NKEYS (3 * S)
#endif
#define NONE 15

#define BIT(k)       (1 << (k))
#define HAS(mask, k) (((mask) >> (k)) & 1)
#define OWNER(c)     ((c) / 2)
#define DRIVER(g)    ((g) / 2)
#define GROUP(i)     ((i) / S)                               /* of save i, counted over all groups */
#define NUMBER(i)    ((i) % S + 1)
#define DIR(i)       ((attempt_of[GROUP(i)] - 1) * S + (ON(KEY) -> (i) % S : 0))
#define IN(k)        ((k) / S + 1)                           /* attempt of directory k */

mtype = { NOTHING, CLAIM, TAKE_OVER, PROVE, COMMIT, MOVE };
mtype:verdict = { GO, STANDS, FENCED, SUPERSEDED, LATE, FAILED, GONE };
mtype:outcome = { APPLIED, REFUSED, UNKNOWN };
mtype:state = { OFF, NEW, LIVE, DEAD, OVER, ENDED };         /* of a group: DEAD by Ray, OVER told so, ENDED with its run */

/* ---- the bucket ---- */
typedef Latest {                                             /* `proven`: the highest attempt whose claim was answered */
  unsigned attempt : 3; unsigned owner : 2; unsigned coordinator : 3; unsigned group : 2; unsigned last : 2; unsigned head : 4;
  unsigned owners : 3; unsigned groups : 4; unsigned live : 9; unsigned evicted : 9; unsigned pinned : 9;
  unsigned proven : 3; unsigned run_id : 1
};
Latest L;                                                    /* attempt 0: there is no `latest` */
unsigned manifest : 9; unsigned half1 : 9; unsigned half2 : 9; unsigned base : 9;
unsigned fresh : 5;                                          /* processes that have read L since it was last written */
mtype hung = NOTHING; unsigned hung_c : 3; unsigned hung_x : 4; unsigned faults : 2 = FAULTS;
#ifdef COMPONENTS
byte ref[NKEYS];                                             /* the directory that holds the base of a checkpoint */
byte base_of[3];
#define REF(k) ref[k]
#else
#define REF(k) (k)
#endif
#ifdef TRACK
byte writer[NKEYS]; unsigned overwritten : 9;
#endif
#ifdef INDEX
byte index[NKEYS]; byte named[NKEYS];                        /* whose bytes are there, and whose the manifest names */
#endif

/* ---- drivers ---- */
bit alive[3]; bit lock[5]; byte known[3]; byte adopted[2];
mtype:state state[3]; byte attempt_of[3]; byte source[3];
byte uploaded[3 * S]; bit told[3 * S];
#ifdef LOSS
byte seen[5];                                                /* the run id of the L that this process saw, plus 1 */
#endif

/* ---- what only the checks know ---- */
unsigned held : 9; unsigned committed : 9; unsigned gone : 9; bit lost;
#ifdef SHORTEST
#define hidden                                               /* a search by breadth cannot have hidden variables */
#endif
hidden byte t, k; hidden short m;                            /* used inside of one d_step only */
#if !ON(RECOMPUTE)
short chosen[5];
#endif
#if !ON(NAMED)
byte paged[5];                                               /* the owners in the pages that this process has read */
#endif

inline check() {
  assert(!(L.live & ~(manifest & half1 & half2)));                                            /* I1, I3 */
  assert(L.head == NONE || HAS(L.live, L.head));                                              /* I3 */
  assert(!(L.pinned & ~L.live));                                                              /* 19 */
  assert(lost || committed == (L.live | gone));                                               /* I4 */
#ifdef TRACK
  assert(!(L.live & overwritten));                                                            /* I2 */
#endif
#ifdef COMPONENTS
  for (t : 0 .. NKEYS - 1) { assert(!HAS(L.live, t) || HAS(base, ref[t])) }                   /* I3 */
#endif
#ifdef INDEX
  for (t : 0 .. NKEYS - 1) { assert(!HAS(L.live, t) || index[t] == named[t]) }                /* I2 */
#endif
  skip
}

inline written() {                                           /* whoever read before must read again; what hung is dead */
  fresh = 0; hung = NOTHING; hung_c = 0; hung_x = 0; held = L.live;
#ifdef COMPONENTS
  for (t : 0 .. NKEYS - 1) { held = held | (HAS(L.live, t) -> BIT(ref[t]) : 0) }
#endif
  printf("    latest: attempt %d (proven %d), owner %d, coordinator %d, group %d, last save %d, head %d, live %x, evicted %x\n",
    L.attempt, L.proven, L.owner, L.coordinator, L.group, L.last, L.head, L.live, L.evicted);
  check()
}

/* ---- swap ---- */
inline to_evict() {                                          /* 19: m = what leaves `live` when one entry joins it */
  m = L.live & ~L.pinned;
#if KEEP == 2
  t = NKEYS;
  do
  :: !t || HAS(L.live, t - 1) -> break
  :: else -> t--
  od;
  m = (t -> m & ~BIT(t - 1) : m);
#endif
  skip
}

inline apply(kind, c, x) {
  d_step {
    if
    :: kind == TAKE_OVER || kind == CLAIM && L.attempt && L.group == x -> L.coordinator = c   /* 8, 12 */
    :: kind == PROVE -> L.proven = L.attempt                                                  /* 10 */
    :: (kind == CLAIM || kind == MOVE) && !(kind == CLAIM && L.attempt && L.group == x) ->    /* 9, 31 */
       assert(!L.attempt || (L.owner == OWNER(c) && kind == CLAIM) || !HAS(L.owners, OWNER(c)));  /* wins at most once */
       L.run_id = (L.attempt -> L.run_id : lost);
       L.attempt++; L.owner = OWNER(c); L.coordinator = c; L.group = (kind == CLAIM -> x : 3); L.last = 0;
       L.head = (kind == CLAIM -> L.head : x);
       L.owners = L.owners | BIT(OWNER(c)); L.groups = L.groups | BIT(L.group)
    :: kind == COMMIT ->                                                                      /* 17 */
       k = DIR(x);
       assert(IN(k) == L.attempt);                                                            /* I4: no older attempt */
       assert(!HAS(committed, k));                                                            /* I4: not back, nor twice */
       assert(L.head == NONE || IN(L.head) != L.attempt || L.head < k);                       /* I4: head not back */
       to_evict();
#if !ON(RECOMPUTE)
       m = chosen[c];
#endif
       L.live = (L.live & ~m) | BIT(k); L.evicted = L.evicted | m; L.head = k; L.last = NUMBER(x);
       committed = committed | BIT(k); gone = gone | m
    fi;
    written()
  }
}

#ifdef LOSS
#define SAW(c) seen[c] = (L.attempt -> L.run_id + 1 : 0)
#else
#define SAW(c) skip
#endif

inline swap(c, kind, x) {                                    /* 3, 4 */
  if
  :: HAS(fresh, c) || !ON(CAS) ->
     if
     :: printf("coordinator %d: %e of %d applied\n", c, kind, x); apply(kind, c, x); r = APPLIED; SAW(c)
     :: faults -> faults--; printf("coordinator %d: %e of %d applied, answer lost\n", c, kind, x); apply(kind, c, x); r = UNKNOWN
     :: faults && hung == NOTHING -> faults--; printf("coordinator %d: %e of %d hangs in the network\n", c, kind, x);
        hung = kind; hung_c = c; hung_x = x; r = UNKNOWN
     fi
  :: else -> printf("coordinator %d: %e of %d refused\n", c, kind, x); r = REFUSED
  fi
}

inline after_swap(c) {                                       /* 4, 5: anything but success is judged afresh, or given up */
  fresh = fresh & ~BIT(c); lock[c] = 0;
  if
  :: r == APPLIED -> v = STANDS
  :: r != APPLIED -> v = GO
  :: r == UNKNOWN -> v = FAILED
  fi;
#if ON(RECOMPUTE)
  r = APPLIED;
#endif
  skip
}

/* The loop of steps 1 to 5, one at a time per process: `decide` sets v from a body just read, `note` sees how it ends. */
#define SWAP(decide, kind, x, note) \
  do \
  :: v != GO -> break \
  :: else -> \
     atomic { !lock[c] -> d_step { decide; note; lock[c] = (v == GO) } }; \
     if \
     :: v == GO -> atomic { swap(c, kind, x); after_swap(c); note } \
     :: else \
     fi \
  od

inline look(c) {                                             /* 1, 4: v = GONE when L is not the one seen before */
  printf("coordinator %d: reads latest\n", c);
  v = GO;
#ifdef LOSS
  if
  :: ON(SEEN) && seen[c] && (!L.attempt || L.run_id + 1 != seen[c]) -> v = GONE
  :: else -> SAW(c)
  fi
#endif
}

inline decided(c) {                                          /* 2: GO swaps the body that was read, all else stops */
  fresh = (v == GO -> fresh | BIT(c) : fresh & ~BIT(c));
  v = (v == SUPERSEDED && !ON(SOFT) -> FENCED : v);
  assert(v != FENCED || L.owner != OWNER(c))                                                  /* I10, 28 */
}

proctype Network() {
  mtype kind;
end:
  do
  :: atomic { hung != NOTHING -> kind = hung; hung = NOTHING; printf("network: %e of %d by coordinator %d lands\n", kind, hung_x, hung_c);
       apply(kind, hung_c, hung_x); kind = NOTHING }
  od
}

/* ---- coordinators ---- */
#if ON(PROVEN) && defined(LOSS)
#define KNOWN L.proven
#else
#define KNOWN L.attempt
#endif
#define PAGED (L.owners & ~BIT(L.owner))                     /* 40: L itself lists the newest owner alone */
#if ON(NAMED)
#define OLDER(c) PAGED
#else
#define OLDER(c) paged[c]
#endif
#define IS_FENCED(c) (ON(OWNERS) && L.owner != OWNER(c) && HAS(OLDER(c), OWNER(c)))           /* 9 */

inline decide_claim(c, g) {                                  /* 8, 9 */
  look(c);
  v = (v == GONE || !L.attempt -> v :
      (IS_FENCED(c) -> FENCED :
      (L.group == g && ON(EFFECT) -> (L.coordinator == c -> STANDS : GO) :
      (HAS(L.groups, g) -> SUPERSEDED : GO))));
  decided(c)
}

inline decide_take_over(c, g) {                              /* 12 */
  look(c);
  v = (v == GONE || !L.attempt -> GONE :
      (IS_FENCED(c) -> FENCED :
      (L.group != g -> SUPERSEDED :
      (L.coordinator == c -> STANDS : GO))));
  decided(c)
}

inline decide_proof(c, g) {                                  /* 10, after the listing */
  look(c);
  v = (v == GONE || !L.attempt -> GONE :
      (L.attempt != attempt || L.group != g -> SUPERSEDED :
      (L.proven == L.attempt -> STANDS :
      (newest > KNOWN - !ON(PROVEN) -> GONE :
      (ON(PROVEN) -> GO : STANDS)))));
  decided(c)
}

inline decide_commit(c, i) {                                 /* 15, 17 */
  look(c);
  v = (v == GONE || !L.attempt -> GONE :
      (HAS(L.live, DIR(i)) && ON(EFFECT) -> STANDS :
      (IS_FENCED(c) -> FENCED :
      (L.coordinator != c || IN(DIR(i)) != L.attempt && ON(ATTEMPT) -> SUPERSEDED :
      (NUMBER(i) <= L.last && ON(LAST) -> LATE :
      (REF(DIR(i)) != DIR(i) && !HAS(held, REF(DIR(i))) && ON(REFS) -> FAILED : GO))))));
  assert(v != LATE || !HAS(L.live, DIR(i)));                                                  /* 18: no false outcome */
#if !ON(RECOMPUTE)
  if
  :: v == GO && r != REFUSED -> to_evict(); chosen[c] = m
  :: else
  fi;
#endif
  decided(c)
}

inline list_newest() {
  m = manifest | half1 | half2; newest = 0;
  for (t : 0 .. NKEYS - 1) { newest = (HAS(m, t) -> IN(t) : newest) };
  printf("coordinator %d: lists checkpoints, newest attempt %d\n", c, newest)
}

inline list_before() {                                       /* 10: judged by the latest that is read after the listing */
  d_step { list_newest() };
  d_step { look(c); v = (newest && (!L.attempt || newest > KNOWN) -> GONE : v); newest = 0 }
}

inline list_after() {                                        /* 10: the claim is answered once this is on record */
  atomic { v = (v == STANDS -> GO : v) };
  do
  :: v != GO -> break
  :: else ->
     d_step { list_newest() };
     atomic { !lock[c] -> d_step { decide_proof(c, g); lock[c] = (v == GO) } };
     if
     :: v == GO -> atomic { swap(c, PROVE, g); after_swap(c) }
     :: else
     fi
  od;
  newest = 0
}

inline answer(c, g) {                                        /* 11; a coordinator that was replaced reaches nobody */
  if
  :: !alive[c] || state[g] != NEW
  :: else ->
     assert(v != GONE || lost);                                                               /* no false alarm */
     printf("coordinator %d: answers the claim of group %d: %e, head %d\n", c, g, v, head);
     if
     :: v == STANDS ->
        assert(head != NONE || !committed || L.attempt != attempt || L.group != g || KNOWN < L.attempt);      /* I7 */
        state[g] = LIVE; attempt_of[g] = attempt; source[g] = head; known[c] = known[c] | BIT(g);
#ifdef COMPONENTS
        base_of[g] = (head == NONE -> NONE : ref[head])
#endif
     :: else -> state[g] = (v == FENCED -> ENDED : OVER)
     fi
  fi
}

inline note_claimed() {
  attempt = (v == STANDS -> L.attempt : 0); head = (v == STANDS -> L.head : 0)
}

#define ASKS(c, g) (alive[c] && state[g] == NEW && DRIVER(g) == OWNER(c))

proctype Claims(byte c) {
  byte g, attempt, head, newest; mtype:verdict v = GO; mtype:outcome r = APPLIED;
end:
  do
  :: atomic {
       ASKS(c, 0) || ASKS(c, 1) || ASKS(c, 2) -> g = (ASKS(c, 0) -> 0 : (ASKS(c, 1) -> 1 : 2));
       printf("coordinator %d: group %d asks for a claim\n", c, g)
     };
#if !ON(NAMED)
     d_step { paged[c] = PAGED; printf("coordinator %d: reads pages of owners %x\n", c, paged[c]) };  /* 9 */
#endif
#ifdef LOSS
     list_before();
#endif
     SWAP(decide_claim(c, g), CLAIM, g, note_claimed());                                   /* 8, 9 */
#ifdef LOSS
     list_after();
#endif
     atomic { answer(c, g); g = 0; v = GO; r = APPLIED; attempt = 0; head = 0 }
  od
}

inline tell(c, i) {                                          /* 18 */
  if
  :: !alive[c]
  :: else ->
     assert(v != GONE || lost);                                                               /* no false alarm */
     printf("coordinator %d: tells the outcome of save %d: %e\n", c, i, v);
     told[i] = 1;
#ifdef COMPONENTS
     base_of[GROUP(i)] = (v == STANDS -> ref[DIR(i)] : base_of[GROUP(i)]);
#endif
     if
     :: state[GROUP(i)] != LIVE || v == STANDS || v == LATE || v == FAILED
     :: else -> state[GROUP(i)] = (v == FENCED -> ENDED : OVER)
     fi
  fi
}

#define BYTES(c) (ON(PURE) -> 1 : c + 1)

inline put_manifest(c, i) {                                  /* 16 */
#ifdef INDEX
  d_step {
    v = (HAS(manifest, DIR(i)) && named[DIR(i)] != BYTES(c) -> FAILED : GO);
    named[DIR(i)] = (HAS(manifest, DIR(i)) -> named[DIR(i)] : BYTES(c)); manifest = manifest | BIT(DIR(i))
  }
#else
  d_step { v = GO; printf("coordinator %d: puts the manifest of directory %d\n", c, DIR(i)); manifest = manifest | BIT(DIR(i)) }
#endif
}

inline note_taken_over(c, i) {
  known[c] = (v == STANDS -> known[c] | BIT(GROUP(i)) : known[c]);
  if
  :: v == STANDS && c == 1 -> adopted[GROUP(i)] = L.last
  :: else
  fi
}

inline delete_early() {
#if !ON(EVICT_FIRST)
  to_evict(); m = (v == GO -> m : 0); half1 = half1 & ~m; half2 = half2 & ~m; check();
#endif
  skip
}

#define IS_PAST(c, i) (c == 1 && NUMBER(i) <= adopted[GROUP(i)])
#define READY(c, i) (alive[c] && uploaded[i] >= 1 + ON(PROOF) && !told[i] && DRIVER(GROUP(i)) == OWNER(c) && \
  (state[GROUP(i)] == LIVE || state[GROUP(i)] == DEAD))

proctype Commits(byte c) {
  byte i; mtype:verdict v = GO; mtype:outcome r = APPLIED;
end:
  do
  :: atomic {                                                /* 14: reports are repeated until told, in any order */
       if
       :: READY(c, 0) -> i = 0
       :: READY(c, 1) -> i = 1
       :: READY(c, 2) -> i = 2
#if S > 1
       :: READY(c, 3) -> i = 3
       :: READY(c, 4) -> i = 4
       :: READY(c, 5) -> i = 5
#endif
#if S > 2
       :: READY(c, 6) -> i = 6
       :: READY(c, 7) -> i = 7
       :: READY(c, 8) -> i = 8
#endif
       fi;
       printf("coordinator %d: has the reports of save %d, in directory %d\n", c, i, DIR(i));
       v = (HAS(known[c], GROUP(i)) -> STANDS : GO)
     };
     SWAP(decide_take_over(c, GROUP(i)), TAKE_OVER, GROUP(i), note_taken_over(c, i));                          /* 12 */
     if
     :: atomic { v == STANDS && IS_PAST(c, i) ->                                              /* 15 */
          d_step { look(c); v = (v == GONE -> GONE : (HAS(L.live, DIR(i)) -> STANDS : LATE)) } }
#ifdef INDEX
     :: atomic { v == STANDS && !IS_PAST(c, i) -> d_step { index[DIR(i)] = BYTES(c); check() } };  /* 16: a plain PUT */
#else
     :: atomic { v == STANDS && !IS_PAST(c, i) -> put_manifest(c, i) };
#endif
#ifdef INDEX
        put_manifest(c, i);
#endif
        SWAP(decide_commit(c, i), COMMIT, i, delete_early())
     :: else
     fi;
#if !ON(LEAVE)
     atomic { m = (v == FAILED -> BIT(DIR(i)) : 0); half1 = half1 & ~m; half2 = half2 & ~m; check() };
#endif
     atomic { tell(c, i); i = 0; v = GO; r = APPLIED }
  od
}

/* ---- worker groups ---- */
inline upload(i) {                                           /* 13; the first half */
#ifdef TRACK
  overwritten = overwritten | (HAS(half1, DIR(i)) && writer[DIR(i)] != i + 1 -> BIT(DIR(i)) : 0); writer[DIR(i)] = i + 1;
  check();
#endif
  printf("group %d: uploads to directory %d\n", g, DIR(i));
  half1 = half1 | BIT(DIR(i)); uploaded[i] = 1;
#ifdef WHOLE
  half2 = half2 | BIT(DIR(i)); uploaded[i] = 2;
#endif
#ifdef COMPONENTS
  if
  :: ref[DIR(i)] = DIR(i); base = base | BIT(DIR(i))
  :: base_of[g] != NONE -> ref[DIR(i)] = base_of[g]
  fi
#endif
}

proctype Group(byte g) {
  byte n;                                                    /* saves begun */
end:
  state[g] != OFF;
  if                                                         /* no search may end waiting here, or for an outcome: I9 */
  :: state[g] != NEW && (state[g] != LIVE || source[g] == NONE)
  :: atomic { state[g] == LIVE && source[g] != NONE -> d_step {
       if                                                    /* 24, 25 */
       :: HAS(manifest & half1 & half2, source[g])
       :: else -> assert(L.attempt != attempt_of[g] || L.group != g); state[g] = OVER         /* I5 */
       fi;
       source[g] = 0
     } }
  fi;
  do
  :: atomic { state[g] == LIVE && n < S && (n == 0 || uploaded[g * S + n - 1] == 2 && (INFLIGHT > 1 || told[g * S + n - 1])) ->
       upload(g * S + n); n++ }
  :: atomic { n && uploaded[g * S + n - 1] == 1 ->           /* also by ranks whose attempt is over */
       uploaded[g * S + n - 1] = 2; half2 = half2 | BIT(DIR(g * S + n - 1)) }
  :: state[g] != LIVE -> break
  :: n == S && told[g * S] && told[g * S + S / 2] && told[g * S + S - 1] -> break
  od
}

proctype Ray() {
  byte kills = KILLS;
end:
  do
  :: atomic { kills && (state[0] == NEW || state[0] == LIVE) -> kills--; state[0] = DEAD; state[1] = NEW; printf("Ray: group 0 dies, 1 starts\n") }
#ifndef ONE_GROUP
  :: atomic { state[0] == OVER && state[1] == OFF -> state[1] = NEW; printf("Ray: group 1 starts\n") }
#endif
#ifdef RESTART
  :: atomic { alive[0] && !alive[1] -> alive[0] = 0; known[0] = 0; alive[1] = 1; printf("Ray: coordinator 1 replaces 0\n") }
#endif
  od
}

/* ---- deletes: by anybody ---- */
#define KEPT (ON(HELD) -> held : L.live)
#define RIPE (L.evicted & (~KEPT | manifest))

inline delete(x) {
  assert(!HAS(committed, x) || HAS(gone, x));                                                 /* I6 */
  printf("process %d: deletes the objects of directory %d\n", _pid, x);
  half1 = half1 & ~BIT(x); half2 = half2 & ~BIT(x); base = base & ~BIT(x);
  check()
}

proctype Pruner() {                                          /* 20, 21 */
  byte x; bit is_kept;
end:
  do
  :: atomic { RIPE -> do :: HAS(RIPE, x) -> break :: else -> x++ od; is_kept = HAS(KEPT, x) };
     d_step { manifest = manifest & ~BIT(x); check(); x = (is_kept -> 0 : x) };
     if
     :: is_kept -> is_kept = 0
     :: else ->
        d_step { delete(x) };
        atomic { if :: HAS(L.evicted, x) -> d_step { L.evicted = L.evicted & ~BIT(x); written() } :: else fi; x = 0 }
     fi
  od
}

proctype Sweeper() {                                         /* 22, 23: once */
  byte x, newest; short found, old;
end:
  d_step { found = manifest | half1 | half2 | base; printf("sweeper: lists %x\n", found) };
  atomic {
    for (x : 0 .. NKEYS - 1) {
      newest = (HAS(found, x) -> IN(x) : newest);
      old = old | (IN(x) < L.attempt || !ON(LOWER) -> found & BIT(x) : 0)
    };
    printf("sweeper: reads latest\n");
    old = (L.attempt && (newest <= KNOWN || !ON(REFUSE)) -> old & ~(KEPT | L.evicted) : 0);
    x = 0; newest = 0; found = 0
  };
  do
  :: atomic { old -> do :: HAS(old, x) -> break :: else -> x++ od; old = old & ~BIT(x); manifest = manifest & ~BIT(x); delete(x); x = 0 }
  :: else -> break
  od
}

/* ---- from outside ---- */
inline read(objects, y) {                                    /* 25 */
  d_step {
    if
    :: x == NONE || HAS(objects, y)
    :: else -> printf("reader: an object is missing\n"); assert(ON(REREAD) && !HAS(L.live, x)); x = NONE
    fi
  }
}

proctype Reader() {
  byte x = NONE;
end:
  atomic { L.head != NONE -> x = L.head; printf("reader: opens directory %d\n", x) };
  read(manifest, x); read(half1, x); read(half2, x);
#ifdef COMPONENTS
  read(base, ref[x])
#endif
}

inline decide_rewind(c) {
  look(c);
  v = ((ON(MOVED) -> HAS(L.owners, OWNER(c)) : L.owner == OWNER(c)) -> STANDS : (HAS(L.live, x) -> GO : FAILED));
  decided(c)
}

proctype Rewinder() {                                        /* 31 */
  byte x, c = 4; mtype:verdict v = GO; mtype:outcome r = APPLIED;
end:
  atomic { L.attempt && L.head != NONE && (L.live & ~BIT(L.head)) -> do :: x != L.head && HAS(L.live, x) -> break :: else -> x++ od };
  SWAP(decide_rewind(c), MOVE, x, skip)
}

proctype Admin() {
end:
#ifdef PIN
  d_step { L.attempt && L.head != NONE -> printf("admin: pins the head\n"); L.pinned = BIT(L.head); written() }      /* 29 */
#endif
#ifdef LOSS
  d_step { L.attempt && committed -> printf("admin: latest is deleted\n"); lost = 1;
    L.attempt = 0; L.owner = 0; L.coordinator = 0; L.group = 0; L.last = 0; L.head = NONE; L.owners = 0; L.groups = 0;
    L.live = 0; L.evicted = 0; L.pinned = 0; L.proven = 0; written() }
#endif
  skip
}

init {
  atomic {
    L.head = NONE; alive[0] = 1; alive[2] = 1;
    state[0] = NEW; state[1] = OFF; state[2] = OFF;
    run Group(0); run Group(1); run Claims(0); run Commits(0); run Pruner(); run Ray();
#ifdef RESTART
    run Claims(1); run Commits(1);
#endif
#ifdef DRIVER_2
    state[2] = NEW; run Group(2); run Claims(2); run Commits(2);
#endif
#if FAULTS
    run Network();
#endif
#ifdef SWEEP
    run Sweeper();
#endif
#ifdef READER
    run Reader();
#endif
#ifdef REWIND
    run Rewinder();
#endif
#if defined(PIN) || defined(LOSS)
    run Admin();
#endif
  }
}
