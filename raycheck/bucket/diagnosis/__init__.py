"""Examines a place for runs: `raycheck doctor`, and what a training refuses before it starts.

- finding.py: what one check has found out, a value.
- checks.py: the checks of the place itself, each of which returns findings. `refuse_unfit_place` raises what they call
  wrong.
- race.py: writers race for one object, and exactly one may win. racing_process.py: such a writer as a process.
- rules.py: what the bucket does on its own: versions, locks, lifecycle rules.

The checks that every node and every coordinator also make are in bucket/protocol/preflight.py; they are used from
there.
"""
