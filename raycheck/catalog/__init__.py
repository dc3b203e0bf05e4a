"""Verbs over whole runs: what makes a bucket of runs as manageable as a repository.

- importing/ makes a run of a checkpoint that something else has written.
"""
