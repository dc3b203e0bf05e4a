"""Lets one run use directories of another, and starts runs from another run's checkpoint.

- holds.py: what one run uses of another in its bucket, step 30.
- new_run.py: a new run from a checkpoint that comes from elsewhere, step 30.
- fork.py: a new run from a checkpoint of another run, step 30.
- base_run.py: what a run in training uses of its base, step 39.
- mirror.py: the `latest` of a copy that follows a run in another place, step 38.
"""
