/* The pages of FORMAT.md's step 40 as a model that spin searches to the end, like protocol.pml. test_spin_model.py runs both.
 *
 * What there is: `latest` (L), whose body names one or two pages; two swappers, which write a page for each try and then
 * swap; a sweeper; a reader of L and its pages; a person who puts L back to the body before it, once. Every request is a
 * step that all others may come between. A swap is applied, refused, applied with its answer lost, or hangs and lands later.
 * Whoever dies just stops: no step is forced.
 *
 * Bounds: TRIES per swapper, FAULTS lost or late answers, PASSES of the sweeper; pages stay for one more write of L, and
 * L goes back by one write, once (HAND).
 *
 * Abstractions: what a page lists is the number of the try that wrote it, and its CRC-32 in a body is that number. A version
 * of L is a bit per swapper, "nothing was written since I read"; a body that is put back gets a new version, since whoever
 * puts it back has stopped the swaps that are under way. Pages of live entries, of evicted ones and of owners are alike;
 * protocol.pml has what a claim concludes from those of owners.
 *
 * -DWITHOUT=<rule> takes one rule away; spin must then find a violation.
 */
#define COUNTER       1   /* 40  the sweep spares pages for bodies after the one that it has read */
#define WRITTEN_FIRST 2   /* 40  a page is written before the swap */
#define TOKEN         3   /* 40  each try has a page of its own */
#define PAST          4   /* 40  a page stays for some writes after the body that named it last */
#define LISTED_FIRST  5   /* 40  the sweep lists the pages before it reads L */
#define AGAIN         6   /* 40  a reader that misses a page reads L again */
#ifndef WITHOUT
#define WITHOUT 0
#endif
#define ON(rule) (WITHOUT != rule)

#ifndef TRIES
#define TRIES 2
#endif
#ifndef FAULTS
#define FAULTS 0
#endif
#ifndef PASSES
#define PASSES 1
#endif
#define NKEYS (2 * TRIES + 2)                                /* without tokens a key is a counter, at most 2 * TRIES + 1 */
#define NONE 15

#define BIT(k)       (1 << (k))
#define HAS(mask, k) (((mask) >> (k)) & 1)
#define MASK(k)      ((k) == NONE -> 0 : BIT(k))

typedef Body { unsigned counter : 4; unsigned new : 4; unsigned crc : 4; unsigned old : 4; unsigned old_crc : 4; unsigned past : 12 };
#define COPY(to, from) to.counter = from.counter; to.new = from.new; to.crc = from.crc; to.old = from.old; \
  to.old_crc = from.old_crc; to.past = from.past
#define NAMED(body) (MASK(body.new) | MASK(body.old))

Body L, before, hung;                                        /* before: what a person may put back */
Body next[2];                                                /* what a swapper has computed */
unsigned there : 12; byte content[NKEYS]; byte made[NKEYS];  /* the pages; made: the counter in the key */
unsigned fresh : 2; bit hangs, may_put_back, was_put_back; unsigned faults : 2 = FAULTS;

#define IS_WHOLE(key, crc) ((key) == NONE || (HAS(there, key) && content[key] == (crc)))
#define CHECK() assert(IS_WHOLE(L.new, L.crc) && IS_WHOLE(L.old, L.old_crc))                  /* I3: a named page exists */

inline forget_hung() {
  hangs = 0; hung.counter = 0; hung.new = 0; hung.crc = 0; hung.old = 0; hung.old_crc = 0; hung.past = 0
}

inline apply(body) {                                         /* 3 */
#ifdef HAND
  if
  :: !was_put_back -> COPY(before, L); may_put_back = (L.counter > 0)
  :: else
  fi;
#endif
  COPY(L, body);
  fresh = 0; forget_hung();
  printf("    latest: counter %d names %d and %d, past %x\n", L.counter, L.new, L.old, L.past)
}

inline write_page() {                                        /* 40: what is there under this key is replaced */
  there = there | BIT(next[i].new); content[next[i].new] = next[i].crc; made[next[i].new] = next[i].counter;
  printf("swapper %d: writes page %d for counter %d\n", i, next[i].new, next[i].counter);
  CHECK()
}

inline compute() {                                           /* 1, 2: the old page stays, or is replaced by the new one */
  next[i].counter = L.counter + 1; next[i].crc = i * TRIES + n;
  next[i].new = (ON(TOKEN) -> i * TRIES + n : L.counter + 1);
  if
  :: next[i].old = L.new; next[i].old_crc = L.crc; next[i].past = (ON(PAST) -> MASK(L.old) : 0)
  :: next[i].old = NONE; next[i].old_crc = 0; next[i].past = (ON(PAST) -> NAMED(L) : 0)
  fi;
  fresh = fresh | BIT(i);
  printf("swapper %d: reads latest of counter %d\n", i, L.counter)
}

proctype Swapper(byte i) {
  byte n;
end:
  do
  :: n == TRIES -> break
  :: n < TRIES ->
     atomic { compute() };
     if
     :: ON(WRITTEN_FIRST) -> d_step { write_page() }
     :: else
     fi;
     atomic {                                                /* 3, 4 */
       if
       :: HAS(fresh, i) -> apply(next[i]); CHECK()
       :: HAS(fresh, i) && faults && !hangs -> faults--; hangs = 1; COPY(hung, next[i])
       :: !HAS(fresh, i) -> printf("swapper %d: refused\n", i)
       fi
     };
     d_step { n++; next[i].counter = 0; next[i].new = 0; next[i].crc = 0; next[i].old = 0; next[i].old_crc = 0; next[i].past = 0 }
  od
}

proctype Network() {
end:
  do
  :: d_step { hangs -> printf("network: a swap to counter %d lands\n", hung.counter); apply(hung); CHECK() }
  od
}

inline list() {
  listed = there; printf("sweeper: lists %x\n", listed)
}

proctype Sweeper() {                                         /* 40 (c) */
  byte passes = PASSES, x; short listed, spared; byte seen;
end:
  do
  :: passes == 0 -> break
  :: passes > 0 ->
     d_step { passes--; listed = 0; if :: ON(LISTED_FIRST) -> list() :: else fi };
     d_step { seen = L.counter; spared = NAMED(L) | L.past; printf("sweeper: reads latest of counter %d\n", seen) };
     d_step {
       if :: !ON(LISTED_FIRST) -> list() :: else fi;
       listed = listed & ~spared;
       for (x : 0 .. NKEYS - 1) { listed = (ON(COUNTER) && made[x] > seen -> listed & ~BIT(x) : listed) };
       x = 0; seen = 0; spared = 0
     };
     do
     :: listed -> d_step {
          do :: HAS(listed, x) -> break :: else -> x++ od;
          printf("sweeper: deletes page %d\n", x);
          listed = listed & ~BIT(x); there = there & ~BIT(x); content[x] = 0; made[x] = 0; x = 0; CHECK()                  /* I6 */
        }
     :: else -> break
     od
  od
}

inline read(page, sum) {                                        /* 40 (b) */
  d_step {
    if
    :: is_again || page == NONE
    :: else ->
       if
       :: HAS(there, page) -> assert(content[page] == sum)       /* body and pages are one value */
       :: else ->
          printf("reader: page %d is missing\n", page);
          assert(ON(AGAIN) && page != missing);
          missing = page; is_again = 1
       fi
    fi
  }
}

proctype Reader() {
  Body mine; byte missing = NONE; bit is_again = 1;
end:
  do
  :: is_again ->
     d_step { COPY(mine, L); is_again = 0; printf("reader: reads latest of counter %d\n", L.counter) };
     read(mine.new, mine.crc);
     read(mine.old, mine.old_crc)
  :: else -> break
  od
}

proctype Hand() {                                            /* 40: a person puts back the body before */
end:
  d_step { may_put_back -> printf("hand: puts latest back to counter %d\n", before.counter);
    COPY(L, before); may_put_back = 0; was_put_back = 1; fresh = 0; forget_hung(); CHECK() }
}

init {
  atomic {
    L.new = NONE; L.old = NONE;
    run Swapper(0); run Swapper(1); run Sweeper(); run Reader();
#if FAULTS
    run Network();
#endif
#ifdef HAND
    run Hand();
#endif
  }
}
