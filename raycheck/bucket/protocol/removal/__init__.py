"""Decides what leaves a run, and deletes it.

- pin_and_evict.py: pin, unpin, evict and forget, steps 19, 21 and 29.
- name_and_score.py: names of single checkpoints, and scores that come later, steps 17 and 29.
- prune_and_sweep.py: the only deletes of checkpoints, steps 19 to 23.
- delete.py: the delete of a checkpoint or run by hand, step 37.
- exported_directories.py: which exported directories are the run's own, and their deletion, step 34.
"""
