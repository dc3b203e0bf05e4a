"""Deletes what has left a run, as decided by the rules or a person.

- prune_and_sweep.py: deletes evicted checkpoints, and what incomplete saves left, steps 19 to 23.
- delete.py: the delete of a checkpoint or run by hand, step 37.
- exported_directories.py: which exported directories are the run's own, and their deletion, step 34.
"""
