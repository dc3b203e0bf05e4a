/* HEADER */

/* ---- bounds ---- */
#ifndef S
#define S 1
#endif
#ifndef KEEP
#define KEEP 1
#endif
#ifndef FAULTS
#define FAULTS 0
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifndef INFLIGHT
#define INFLIGHT 1
#endif
#ifdef REWIND
#define ATTEMPTS 4
#else
#define ATTEMPTS 3
#endif
#define NSAVES (3 * S)
#define NKEYS  (ATTEMPTS * S)
#define NONE   15

/* ---- names ---- */
#define BIT(k)     (1 << (k))
#define HAS(m, k)  (((m) >> (k)) & 1)
#define OWNER(c)   ((c) / 2)                   /* coordinators 0 and 1 = C1.0 and C1.1, 2 = C2.0, 4 = the rewind */
#define DRIVER(g)  ((g) / 2)                   /* groups 0 and 1 of driver 1, group 2 of driver 2, 3 = the rewind's */
#define GROUP(i)   ((i) / S)                   /* of save i */
#define NUMBER(i)  ((i) % S + 1)
#define ATTEMPT(k) ((k) / S + 1)               /* of key k */
#ifdef NO_KEY
#define KEY(i)     ((gatt[GROUP(i)] - 1) * S)
#else
#define KEY(i)     ((gatt[GROUP(i)] - 1) * S + (i) % S)
#endif

/* ---- rules that stand in a condition ---- */
#ifdef NO_CAS
#define FRESH(c) true
#else
#define FRESH(c) HAS(fresh, c)
#endif
#ifdef NO_EFFECT
#define EFFECT false
#else
#define EFFECT true
#endif
#ifdef NO_OWNER
#define IS_FENCED(c) false
#else
#define IS_FENCED(c) (L.owner != OWNER(c) && HAS(L.owners, OWNER(c)))
#endif
#ifdef NO_ATT
#define RIGHT_ATTEMPT(k) true
#else
#define RIGHT_ATTEMPT(k) (ATTEMPT(k) == L.att)
#endif
#ifdef NO_COORD
#define RIGHT_COORDINATOR(c) true
#else
#define RIGHT_COORDINATOR(c) (L.coord == c)
#endif
#ifdef NO_LAST
#define IN_ORDER(n) true
#else
#define IN_ORDER(n) (n > L.last)
#endif
#if defined(NO_PROVEN) || !defined(LOSS)
#define SURE     L.att
#define UNPROVEN false
#else
#define SURE     L.proven
#define UNPROVEN (L.proven < L.att)
#endif
#ifdef LOSS
#define SEEN_NOW(c) seen[c] = L.run_id + 1
#else
#define SEEN_NOW(c) skip
#endif
#ifdef NO_PROOF
#define REPORTED 1
#else
#define REPORTED 2
#endif

/* kinds of swap */
#define CLAIM  1
#define TAKE   2
#define COMMIT 3
#define PROVE  4
#define MOVE   5
/* verdicts of a decision */
#define GO         0
#define STANDS     1
#define FENCED     2
#ifdef NO_SOFT
#define SUPERSEDED FENCED
#else
#define SUPERSEDED 3
#endif
#define LATE       4
#define FAILED     5
#define GONE       6
/* how a swap ended */
#define APPLIED 0
#define REFUSED 1
#define UNKNOWN 2
/* states of a group */
#define OFF     0
#define NEW     1
#define LIVE    2
#define DEAD    3
#define OVER    4
#define ENDED   5

/* ---- the bucket: `latest`, the checkpoints' objects as one bit per directory, one swap under way in the network ---- */
typedef Latest {
  unsigned att : 3; unsigned owner : 2; unsigned coord : 3; unsigned grp : 2; unsigned last : 2; unsigned head : 4;
  unsigned owners : 3; unsigned grps : 4; unsigned live : 9; unsigned evicted : 9; unsigned pins : 9;
  unsigned proven : 3; unsigned run_id : 1
};
Latest L;
unsigned man : 9; unsigned half1 : 9; unsigned half2 : 9; unsigned base : 9;
unsigned fresh : 5;
unsigned net : 3; unsigned netc : 3; unsigned netx : 4;
unsigned faults : 2 = FAULTS;
#ifdef REFS
byte ref[NKEYS];
#define REF(k) ref[k]
#else
#define REF(k) (k)
#endif
#ifdef TRACK
byte writer[NKEYS];
unsigned dirty : 9;
#endif
#ifdef INDEX
byte index[NKEYS];
byte named[NKEYS];
#endif

/* ---- actors ---- */
bit alive[3]; bit lock[3]; byte known[3]; byte adopted[2];
byte state[3]; byte gatt[3]; byte source[3];
byte up[NSAVES]; bit told[NSAVES];
#ifdef REFS
byte gbase[3];
#endif
#ifdef NO_RECOMPUTE
short chosen[3];
#endif

/* ---- ghosts: what was ever committed and ever evicted; and whether `latest` was lost ---- */
unsigned held : 9; unsigned com : 9; unsigned gone : 9; bit lost;
#ifdef LOSS
byte seen[5];
#endif

#ifdef SHORTEST
#define hidden
#endif
hidden byte t, k; hidden short m;


inline check() {                               /* after every change of `latest` */
  assert(!(L.live & ~man) && !(L.live & ~half1) && !(L.live & ~half2));                       /* I1, I3 */
  assert(L.head == NONE || HAS(L.live, L.head));
  assert(!(L.pins & ~L.live));                                                                /* 19 */
  assert(lost || com == (L.live | gone));                                                     /* I4 */
#ifdef TRACK
  assert(!(L.live & dirty));                                                                  /* I2 */
#endif
#ifdef REFS
  for (t : 0 .. NKEYS - 1) { assert(!HAS(L.live, t) || HAS(base, ref[t])) }
#endif
#ifdef INDEX
  for (t : 0 .. NKEYS - 1) { assert(!HAS(L.live, t) || index[t] == named[t]) }
#endif
}

inline written() {
  fresh = 0; net = 0; netc = 0; netx = 0; held = L.live;
#ifdef REFS
  for (t : 0 .. NKEYS - 1) { held = held | (HAS(L.live, t) -> BIT(ref[t]) : 0) }
#endif
  check()
}

/* ---- swap, 1 to 5 ---- */
inline to_evict() {                           /* 19: m = what leaves `live` when a newer entry joins it */
  m = L.live & ~L.pins;
#if KEEP == 2
  if
  :: L.live -> t = NKEYS - 1; do :: HAS(L.live, t) -> break :: else -> t-- od; m = m & ~BIT(t)
  :: else
  fi;
#endif
}

inline apply(kind, c, x) {
  d_step {
    if
    :: kind == CLAIM && L.att && L.grp == x -> L.coord = c                                    /* 8 */
    :: kind == CLAIM && !(L.att && L.grp == x) ->                                             /* 9 */
       L.run_id = (L.att -> L.run_id : lost);
       assert(!L.att || L.owner == OWNER(c) || !HAS(L.owners, OWNER(c)));                     /* no ping-pong */
       L.att++; L.owner = OWNER(c); L.coord = c; L.grp = x; L.last = 0;
       L.owners = L.owners | BIT(OWNER(c)); L.grps = L.grps | BIT(x)
    :: kind == TAKE -> L.coord = c                                                            /* 12 */
    :: kind == PROVE -> L.proven = L.att                                                          /* 10 */
    :: kind == MOVE ->                                                                        /* 31 */
       assert(!HAS(L.owners, OWNER(c)));
       L.att++; L.owner = OWNER(c); L.coord = c; L.grp = 3; L.last = 0; L.head = x;
       L.owners = L.owners | BIT(OWNER(c)); L.grps = L.grps | BIT(3)
    :: kind == COMMIT ->                                                                      /* 17 */
       k = KEY(x);
       assert(ATTEMPT(k) == L.att);                                                           /* I4 */
       assert(!HAS(com, k));                                                                  /* I4 */
       assert(L.head == NONE || ATTEMPT(L.head) != L.att || L.head < k);                      /* I4 */
       to_evict();
#ifdef NO_RECOMPUTE
       m = chosen[c];
#endif
       L.live = (L.live & ~m) | BIT(k); L.evicted = L.evicted | m; L.head = k; L.last = NUMBER(x);
       com = com | BIT(k); gone = gone | m
    fi;
    printf("  latest: attempt %d of owner %d, coordinator %d, group %d; last save %d, head %d, live %x, evicted %x\n",
      L.att, L.owner, L.coord, L.grp, L.last, L.head, L.live, L.evicted);
    written()
  }
}

/* Step 3 with its four outcomes. A request that hangs in the network lands later or dies with the next write. */
inline swap(c, kind, x) {
  if
  :: FRESH(c) -> printf("coordinator %d: swap %d of %d applied\n", c, kind, x); apply(kind, c, x); r = APPLIED; SEEN_NOW(c)
  :: FRESH(c) && faults -> faults--; printf("coordinator %d: swap %d of %d applied, answer lost\n", c, kind, x); apply(kind, c, x); r = UNKNOWN
  :: FRESH(c) && faults && !net -> faults--; printf("coordinator %d: swap %d of %d hangs in the network\n", c, kind, x); net = kind; netc = c; netx = x; r = UNKNOWN
  :: !FRESH(c) -> printf("coordinator %d: swap %d of %d refused\n", c, kind, x); r = REFUSED
  fi
}

proctype Network() {
  byte kind;
end:
  do
  :: atomic { net -> kind = net; net = 0; printf("network: swap %d of %d by coordinator %d lands late\n", kind, netx, netc); apply(kind, netc, netx); kind = 0 }
  od
}



/* Step 1: v = GONE when `latest` is not what this process has seen before (4). */
inline look(c) {
  v = GO; printf("coordinator %d: reads latest\n", c);
#ifdef LOSS
  if
  :: seen[c] && (!L.att || L.run_id + 1 != seen[c]) -> v = GONE
  :: else -> seen[c] = (L.att -> L.run_id + 1 : 0)
  fi
#endif
}

inline judged(c) {                             /* may it swap; and the errors of two kinds */
  fresh = (v == GO -> fresh | BIT(c) : fresh & ~BIT(c));
  assert(v != FENCED || L.owner != OWNER(c));                                                 /* I10 */
  assert(v != GONE || lost)
}

/* ---- coordinators ---- */
inline decide_claim(c, g) {                    /* 8, 9 */
  look(c);
  if
  :: v == GONE || !L.att
  :: else -> if
     :: IS_FENCED(c) -> v = FENCED
     :: else -> if
        :: L.grp == g && EFFECT -> v = (L.coord == c -> STANDS : GO)
        :: else -> v = (HAS(L.grps, g) -> SUPERSEDED : GO)
        fi
     fi
  fi;
  judged(c)
}

inline decide_take(c, g) {                     /* 12 */
  look(c);
  if
  :: v == GONE || !L.att -> v = GONE
  :: else -> if
     :: IS_FENCED(c) -> v = FENCED
     :: else -> v = (L.grp != g -> SUPERSEDED : (L.coord == c -> STANDS : GO))
     fi
  fi;
  judged(c)
}

inline held_ref(i) {
#if defined(REFS) && !defined(NO_REFS)
  v = (ref[KEY(i)] == KEY(i) || HAS(held, ref[KEY(i)]) -> GO : FAILED)
#else
  v = GO
#endif
}

inline decide_commit(c, i) {                   /* 15, 17 */
  look(c);
  if
  :: v == GONE || !L.att -> v = GONE
  :: else -> if
     :: HAS(L.live, KEY(i)) && EFFECT -> v = STANDS
     :: else -> if
        :: IS_FENCED(c) -> v = FENCED
        :: else -> if
           :: !(RIGHT_ATTEMPT(KEY(i)) && RIGHT_COORDINATOR(c)) -> v = SUPERSEDED
           :: else -> if
              :: !IN_ORDER(NUMBER(i)) -> v = LATE; assert(!HAS(L.live, KEY(i)))
              :: else -> held_ref(i)
              fi
           fi
        fi
     fi
  fi;
  judged(c);
#ifdef NO_RECOMPUTE
  if
  :: v == GO && r == APPLIED -> to_evict(); chosen[c] = m
  :: else
  fi
#endif
}

inline answer(c, g) {                          /* 11; a coordinator that was restarted meanwhile reaches nobody */
  assert(v != GONE || lost);
  if
  :: !alive[c] || state[g] != NEW
  :: else -> printf("coordinator %d: answers claim of group %d: verdict %d, head %d\n", c, g, v, head); if
     :: v == STANDS ->
        assert(head != NONE || !com || L.att != attempt || L.grp != g || UNPROVEN);           /* I7 */
        state[g] = LIVE; gatt[g] = attempt; source[g] = head; known[c] = known[c] | BIT(g);
#ifdef REFS
        gbase[g] = (head == NONE -> NONE : ref[head])
#endif
     :: v == FENCED -> state[g] = ENDED
     :: else -> state[g] = OVER
     fi
  fi
}

inline tell(c, i) {                            /* 18 */
  if
  :: !alive[c]
  :: else ->
     told[i] = 1; printf("coordinator %d: tells of save %d: verdict %d\n", c, i, v);
     if
     :: state[GROUP(i)] != LIVE || v == LATE || v == FAILED
     :: else -> if
        :: v == FENCED -> state[GROUP(i)] = ENDED
        :: v == STANDS ->
#ifdef REFS
           gbase[GROUP(i)] = ref[KEY(i)];
#endif
           skip
        :: else -> state[GROUP(i)] = OVER
        fi
     fi
  fi
}

inline retry_or_give_up(c) {                   /* 5: after the deadline the outcome stays unknown */
  fresh = fresh & ~BIT(c);
  if
  :: v = GO
  :: r == UNKNOWN -> v = FAILED
  fi;
#ifndef NO_RECOMPUTE
  r = 0;
#endif
}

#define ASKS(c, g)  (state[g] == NEW && DRIVER(g) == OWNER(c))
#define READY(c, i) (up[i] >= REPORTED && !told[i] && DRIVER(GROUP(i)) == OWNER(c) && (state[GROUP(i)] == LIVE || state[GROUP(i)] == DEAD))

inline list_newest() {
  m = man | half1 | half2; newest = 0;
  for (t : 0 .. NKEYS - 1) { newest = (HAS(m, t) -> ATTEMPT(t) : newest) };
  printf("coordinator %d: lists checkpoints, newest attempt %d\n", c, newest)
}

inline list_before() {                         /* 10, before: v = GONE for a directory that `latest` does not know */
#ifdef LOSS
#ifndef NO_LIST_BEFORE
  do
  :: d_step { look(c); attempt = L.att; sure = SURE };
     if
     :: v == GONE -> break
     :: else
     fi;
     d_step { list_newest() };
     if
     :: !newest || (attempt && newest <= sure) -> break
     :: else -> d_step { look(c); if :: v == GO && L.att == attempt && sure == SURE -> v = GONE :: else fi }
     fi;
     if
     :: v == GONE -> break
     :: else
     fi
  od;
  atomic { attempt = 0; sure = 0; newest = 0 };
#endif
#endif
  skip
}

inline list_after() {                          /* 10, after: proven when no directory of this attempt is there */
#ifdef LOSS
#ifdef NO_PROVEN
  if
  :: v == STANDS && is_new ->
     d_step { list_newest() };
     d_step {
       look(c);
       if
       :: v == GONE || newest < L.att -> v = (v == GONE -> GONE : STANDS)
       :: else -> v = (L.att > attempt -> SUPERSEDED : GONE)
       fi
     }
  :: else
  fi;
#else
  if
  :: v == STANDS -> v = GO
  :: else
  fi;
  do
  :: v != GO -> break
  :: else ->
     d_step { list_newest() };
     atomic { !lock[c] -> lock[c] = 1 };
     d_step {
       look(c);
       if
       :: v == GONE || !L.att -> v = GONE
       :: else -> if
          :: L.att != attempt || L.grp != g -> v = SUPERSEDED
          :: else -> v = (L.proven == L.att -> STANDS : (newest > L.proven -> GONE : GO))
          fi
       fi;
       judged(c);
       lock[c] = (v == GO)
     };
     if
     :: v == GO -> atomic {
          swap(c, PROVE, g);
          if
          :: r == APPLIED -> v = STANDS
          :: else -> retry_or_give_up(c)
          fi;
          lock[c] = 0
        }
     :: else
     fi
  od;
#endif
  newest = 0;
#endif
  skip
}

proctype Claims(byte c) {
  byte g, v, r, attempt, head;
#ifdef LOSS
  byte newest, sure; bit is_new = 1;
#endif
end:
  do
  :: atomic {
       alive[c] && (ASKS(c, 0) || ASKS(c, 1) || ASKS(c, 2)) ->
       g = (ASKS(c, 0) -> 0 : (ASKS(c, 1) -> 1 : 2));
       v = GO; printf("coordinator %d: claim of group %d begins\n", c, g)
     };
     list_before();
     do
     :: v != GO -> break
     :: else ->
        atomic { !lock[c] -> lock[c] = 1 };
        d_step {
          decide_claim(c, g); lock[c] = (v == GO);
          if
          :: v == STANDS -> attempt = L.att; head = L.head
          :: else
          fi;
#if defined(LOSS) && defined(NO_PROVEN)
          is_new = (L.att -> L.grp != g : is_new)
#endif
        };
        if
        :: v == GO -> atomic {
             swap(c, CLAIM, g);
             if
             :: r == APPLIED -> v = STANDS; attempt = L.att; head = L.head
             :: else -> retry_or_give_up(c)
             fi;
             lock[c] = 0
           }
        :: else
        fi
     od;
     list_after();
     atomic { answer(c, g); g = 0; v = 0; r = 0; attempt = 0; head = 0 }
  od
}

#ifdef NO_PURE
#define BYTES (c + 1)
#else
#define BYTES 1
#endif

inline taken() {
  if
  :: v == STANDS -> known[c] = known[c] | BIT(GROUP(i)); if :: c == 1 -> adopted[GROUP(i)] = L.last :: else fi
  :: else
  fi
}

inline put_manifest() {                        /* 16 */
#ifdef INDEX
  d_step {                                     /* a plain PUT, as of an index above 1 MiB */
    index[KEY(i)] = BYTES; v = GO; check()
  };
#endif
  d_step {
    v = GO; printf("coordinator %d: puts manifest of %d\n", c, KEY(i));
    if
#ifdef INDEX
    :: HAS(man, KEY(i)) -> v = (named[KEY(i)] == BYTES -> GO : FAILED)
    :: else -> named[KEY(i)] = BYTES; man = man | BIT(KEY(i))
#elif defined(TRACK)
    :: HAS(man, KEY(i)) -> v = (writer[KEY(i)] == i + 1 -> GO : FAILED)
    :: else -> man = man | BIT(KEY(i))
#else
    :: true -> man = man | BIT(KEY(i))
#endif
    fi
  }
}

proctype Commits(byte c) {
  byte i, v, r;
end:
  do
  :: atomic {
       if
       :: alive[c] && READY(c, 0) -> i = 0
       :: alive[c] && READY(c, 1) -> i = 1
       :: alive[c] && READY(c, 2) -> i = 2
#if S > 1
       :: alive[c] && READY(c, 3) -> i = 3
       :: alive[c] && READY(c, 4) -> i = 4
       :: alive[c] && READY(c, 5) -> i = 5
#endif
#if S > 2
       :: alive[c] && READY(c, 6) -> i = 6
       :: alive[c] && READY(c, 7) -> i = 7
       :: alive[c] && READY(c, 8) -> i = 8
#endif
       fi;
       printf("coordinator %d: has the reports of save %d, directory %d\n", c, i, KEY(i)); v = (HAS(known[c], GROUP(i)) -> STANDS : GO)
     };
     do
     :: v != GO -> break                       /* 12: known, or taken over */
     :: else ->
        atomic { !lock[c] -> lock[c] = 1 };
        d_step { decide_take(c, GROUP(i)); taken(); lock[c] = (v == GO) };
        if
        :: v == GO -> atomic {
             swap(c, TAKE, GROUP(i));
             if
             :: r == APPLIED -> v = STANDS; taken()
             :: else -> retry_or_give_up(c)
             fi;
             lock[c] = 0
           }
        :: else
        fi
     od;
     if
     :: v == STANDS && c == 1 && NUMBER(i) <= adopted[GROUP(i)] ->                            /* 15 */
        d_step { look(c); if :: v == GO -> v = (HAS(L.live, KEY(i)) -> STANDS : LATE) :: else fi }
     :: v == STANDS && !(c == 1 && NUMBER(i) <= adopted[GROUP(i)]) ->
        put_manifest();
        do
        :: v != GO -> break
        :: else ->
           atomic { !lock[c] -> lock[c] = 1 };
           d_step { decide_commit(c, i); lock[c] = (v == GO) };
           if
           :: v == GO ->
#ifdef NO_EVICT
              d_step { to_evict(); half1 = half1 & ~m; half2 = half2 & ~m; man = man & ~m; check() };
#endif
              atomic {
                swap(c, COMMIT, i);
                if
                :: r == APPLIED -> v = STANDS
                :: else -> retry_or_give_up(c)
                fi;
                lock[c] = 0
              }
           :: else
           fi
        od
     :: else
     fi;
     atomic {
#ifdef NO_KEEPOBJ
       if
       :: v == FAILED -> m = BIT(KEY(i)); man = man & ~m; half1 = half1 & ~m; half2 = half2 & ~m
       :: else
       fi;
#endif
       tell(c, i); i = 0; v = 0; r = 0
     }
  od
}

/* ---- worker groups: upload, and report until told ---- */
inline restore(objects) {                      /* 24, 25 */
  d_step {
    if
    :: state[g] != LIVE || HAS((objects), source[g])
    :: else -> assert(L.att != gatt[g] || L.grp != g); state[g] = OVER
    fi;
    source[g] = 0
  }
}

inline upload_first(i) {                       /* 13 */
  up[i] = 1; printf("group %d: uploads to %d\n", g, KEY(i));
#ifdef TRACK
  dirty = dirty | (HAS(half1, KEY(i)) && writer[KEY(i)] != i + 1 -> BIT(KEY(i)) : 0); writer[KEY(i)] = i + 1;
  check();
#endif
  half1 = half1 | BIT(KEY(i));
#ifdef WHOLE
  up[i] = 2; half2 = half2 | BIT(KEY(i));
#endif
#ifdef REFS
  if
  :: ref[KEY(i)] = KEY(i); base = base | BIT(KEY(i))
  :: gbase[g] != NONE -> ref[KEY(i)] = gbase[g]
  fi
#endif
}

proctype Group(byte g) {
  byte n;
end_off:
  state[g] != OFF;
  state[g] != NEW;                             /* not an end: a claim is answered (I9) */
  if
  :: state[g] == LIVE ->
     if
     :: source[g] != NONE -> restore(man & half1 & half2)
     :: else -> source[g] = 0
     fi
  :: state[g] != LIVE
  fi;
  do
  :: atomic { state[g] == LIVE && n < S && (n == 0 || up[g * S + n - 1] == 2 && (INFLIGHT == 2 || told[g * S + n - 1])) ->
       upload_first(g * S + n); n++ }
  :: atomic { n && up[g * S + n - 1] == 1 ->   /* also by ranks whose attempt is over */
       up[g * S + n - 1] = 2; half2 = half2 | BIT(KEY(g * S + n - 1)) }
  :: state[g] != LIVE -> break
  :: n == S && told[g * S + S - 1] && told[g * S] && told[g * S + S / 2] -> break
  od
}

/* ---- what Ray and people do ---- */
proctype Ray() {
  byte kills = KILLS;
end:
  do
  :: atomic { kills && (state[0] == NEW || state[0] == LIVE) -> kills--; state[0] = DEAD; state[1] = NEW; printf("Ray: group 0 dies, group 1 starts\n") }
  #ifndef ONE_GROUP
  :: atomic { state[0] == OVER && state[1] == OFF -> state[1] = NEW; printf("Ray: group 1 starts\n") }
#endif
#ifdef RESTART
  :: atomic { alive[0] && !alive[1] -> alive[0] = 0; alive[1] = 1; known[0] = 0; printf("Ray: coordinator 0 is replaced by 1\n") }
#endif
  od
}

proctype Admin() {
end:
#ifdef PIN
  d_step { L.att && L.head != NONE -> L.pins = L.pins | BIT(L.head); printf("admin: pins %d\n", L.head); written() }              /* 29 */
#endif
#ifdef LOSS
  d_step { L.att && com -> lost = 1; printf("admin: latest is deleted\n"); L.att = 0; L.owner = 0; L.coord = 0; L.grp = 0; L.last = 0; L.head = NONE; L.owners = 0;
    L.grps = 0; L.live = 0; L.evicted = 0; L.pins = 0; L.proven = 0; fresh = 0; net = 0 }
#endif
}


#ifdef NO_SWEEP_LOWER
#define IS_OLD(x) true
#else
#define IS_OLD(x) (ATTEMPT(x) < L.att)
#endif
#ifdef NO_HELD
#define HELD L.live
#else
#define HELD held
#endif
#ifdef NO_SWEEP_EVICTED
#define SPARED HELD
#else
#define SPARED (HELD | L.evicted)
#endif
#define RIPE (L.evicted & (~HELD | man))

inline delete_objects(x) {
  printf("process %d: deletes objects of %d\n", _pid, x);
  assert(!HAS(com, x) || HAS(gone, x));                                                       /* I6 */
  half1 = half1 & ~BIT(x); half2 = half2 & ~BIT(x);
#ifdef REFS
  base = base & ~BIT(x);
#endif
  check()
}

proctype Pruner() {                            /* 20, 21: by anybody */
  byte x; bit is_held;
end:
  do
  :: atomic { RIPE -> x = 0; do :: HAS(RIPE, x) -> break :: else -> x++ od; is_held = HAS(HELD, x) };
     d_step { printf("pruner: deletes manifest of %d\n", x); man = man & ~BIT(x); check() };
     if
     :: !is_held -> d_step { delete_objects(x) };
        d_step { if :: HAS(L.evicted, x) -> L.evicted = L.evicted & ~BIT(x); written() :: else fi; x = 0 }
     :: else -> d_step { x = 0; is_held = 0 }
     fi
  od
}

#ifdef SWEEP
inline judge_old() {
  dead = 0; printf("sweeper: reads latest\n");
  for (x : 0 .. NKEYS - 1) { dead = dead | (L.att && IS_OLD(x) && !HAS(SPARED, x) -> BIT(x) : 0) }
  x = 0
}
proctype Sweeper() {                           /* 22, 23: by anybody, once */
  byte x; short found, dead;
end:
#ifdef NO_SWEEP_ORDER
  d_step { judge_old(); }
  d_step { found = man | half1 | half2 | base; dead = dead & found };
#else
  d_step { found = man | half1 | half2 | base; printf("sweeper: lists %x\n", found) };
  d_step { judge_old(); dead = dead & found; found = 0 };
#endif
  do
  :: atomic { dead -> x = 0; do :: HAS(dead, x) -> break :: else -> x++ od; dead = dead & ~BIT(x);
       man = man & ~BIT(x); delete_objects(x); x = 0 }
  :: else -> break
  od
}

#endif

#ifdef READER
#ifdef NO_REREAD
#define IS_DAMAGE(x) true
#else
#define IS_DAMAGE(x) (L.att && HAS(L.live, x))
#endif
inline read(objects) {
  d_step {
    if
    :: x == NONE || HAS(objects, x)
    :: else -> assert(!IS_DAMAGE(x)); x = NONE
    fi
  }
}

inline read_base() {
#ifdef REFS
  d_step {
    if
    :: x == NONE -> skip
    :: else -> assert(HAS(base, ref[x]) || !IS_DAMAGE(x))
    fi
  }
#endif
  skip
}
proctype Reader() {                            /* 25, from outside */
  byte x = NONE;
end:
  atomic { L.head != NONE && L.att -> x = L.head };
  read(man); read(half1); read(half2); read_base()
}

#endif

#ifdef REWIND
#ifdef NO_REWIND_EFFECT
#define MOVED (L.owner == OWNER(4))
#else
#define MOVED HAS(L.owners, OWNER(4))
#endif
proctype Rewinder() {                          /* 31 */
  byte x, v, r;
end:
  atomic { L.att && (L.live & ~BIT(L.head)) -> x = 0; do :: x != L.head && HAS(L.live, x) -> break :: else -> x++ od };
  do
  :: v != GO -> break
  :: else ->
     d_step {
       look(4);
       v = (MOVED -> STANDS : (HAS(L.live, x) -> GO : FAILED));
       judged(4)
     };
     if
     :: v == GO -> atomic { swap(4, MOVE, x); if :: r == APPLIED -> v = STANDS :: else -> retry_or_give_up(4) fi }
     :: else
     fi
  od
}
#endif

init {
  d_step { L.head = NONE; alive[0] = 1; alive[2] = 1; state[0] = NEW };
  atomic {
#ifdef D2
    state[2] = NEW; run Group(2); run Claims(2); run Commits(2);
#endif
    run Group(0); run Group(1);
    run Claims(0); run Commits(0);
#ifdef RESTART
    run Claims(1); run Commits(1);
#endif
    run Pruner(); run Ray();
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
    run Admin()
#endif
  }
}
