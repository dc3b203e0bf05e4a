"""Implements the protocol of FORMAT.md: everything that writes `latest`, commits a checkpoint, or deletes. In the order
of its steps:

- swap.py: the compare-and-swap of `latest`, steps 1 to 5. Nothing else writes `latest`, except repair.py.
- paging.py: moves what is not the newest out of `latest`, step 40.
- preflight.py: the test on a scratch object that the store honors conditional writes, step 6.
- claim.py: a group becomes the live attempt and fences the older ones, steps 8 to 12 and 28.
- resume.py: what `resume` requests, and the checkpoint that a new owner's first attempt restores, step 9.
- write_once.py: small objects that never change, written by put-if-absent; all documents of a save, step 16; the
  manifest of a new run's first checkpoint, step 30.
- object_copy.py: copies of objects, verified on both sides, several at a time, steps 16, 30 and 38.
- referred_objects.py: checks that what a commit refers to still exists, step 16.
- commit.py: THE commit point, step 17; the end of the run, step 33.
- retention.py: which checkpoints stay, a pure decision, step 19.
- pin_and_evict.py: pin, unpin, evict and forget, steps 19, 21 and 29.
- name_and_score.py: names of single checkpoints, and scores added after the commit, steps 17 and 29.
- removal/: deletes of what a run has dropped, steps 19 to 23, 34 and 37.
- damage.py: the return from a damaged checkpoint to an earlier one, step 26.
- rewind.py, repair.py: a return to an earlier checkpoint by hand, step 31; rebuilding a lost `latest`, step 32.
- sharing/: forks, borrowed directories, bases and mirrors, steps 30, 38 and 39.

Other modules implement steps 7, 13 to 15 and 18 (group/coordinator/), 16 (assembly/), 24, 25 and 27 (reading.py,
group/), reading pages, 40 (pages.py), 35 and 36 (catalog/archive/).
"""
