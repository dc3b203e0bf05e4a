"""What may become of `latest` and of a run's objects: claim, commit, retention, deletes, repair.

The step numbers are those of FORMAT.md.
"""
