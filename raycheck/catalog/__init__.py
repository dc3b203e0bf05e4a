"""Works with many runs in one bucket. Each file is one of its matters; none of them knows torch or Ray.

- listing.py finds the runs below a prefix: `raycheck runs`.
- forks.py begins a run from another one's checkpoint: `raycheck fork`.
- deletes.py deletes checkpoints and runs: `raycheck delete`, `raycheck delete-run`.
"""
