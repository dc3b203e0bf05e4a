"""Works with many runs in one bucket. Each file is one of its matters.

- listing.py finds the runs below a prefix: `raycheck runs`. It knows neither torch nor Ray.
- importing/ makes a run of a checkpoint that something else has written: `raycheck import`.
"""
