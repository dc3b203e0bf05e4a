"""Lets one run use what another has: references to its directories, and runs that begin from it.

- holds.py: what one run uses of another in its bucket, step 30.
- new_run.py: a new run from a checkpoint of elsewhere, step 30.
- fork.py: a new run from another's head, step 30.
- base_run.py: what a run that is trained uses of its base, step 39.
- mirror.py: `latest` of a copy that follows a run in another place, step 38.
"""
