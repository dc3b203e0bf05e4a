"""Works with many runs in one bucket, one file per task.

- listing.py finds the runs under a prefix: `raycheck runs`.
- forks.py creates a run from another run's checkpoint: `raycheck fork`.
- policy.py prunes many runs by the rules of a file: `raycheck prune-runs`.
- deletes.py deletes checkpoints and runs: `raycheck delete`, `raycheck delete-run`.
- archive/ packs a checkpoint into one tar file, and creates a new run from such a file.
- download.py fetches a checkpoint into a folder, as stock DCP directories or safetensors files.
- download_safetensors.py is the part of download.py that needs torch.
- local_files.py writes files that appear under their names only when complete.
- stored_objects.py finds a checkpoint and its objects, wherever they are stored.
- read_ahead.py streams bytes from and to stores, in bounded memory.
- importing/ creates a run from a checkpoint that another program wrote: `raycheck import`.
- copy.py copies a run, or one checkpoint into a new run, to another place: `raycheck cp`.
- follow.py keeps a copy of a run up to date while it is trained.
- copier.py makes a mirror show what its source has; both of the above use it.
"""
