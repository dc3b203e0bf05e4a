"""Holds the verbs over whole runs, of which a bucket has many.

- copy.py: copies a run, or one checkpoint into a new run, to another place.
- follow.py: keeps a copy of a run up to date while it is trained.
- copier.py: makes a mirror show what its source has; both of the above use it.
- object_copy.py: moves the bytes of a checkpoint, several objects at a time, verified on both sides.
"""
