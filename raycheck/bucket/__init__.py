"""Keeps a run in a bucket: its keys and documents, the stores, and the protocol that makes a checkpoint visible.

It depends on the standard library and store clients, neither on torch nor on ray. FORMAT.md is the specification. In
order:

- format/: the contents of each object, as values and as bytes. Accesses no store.
- store/: one interface to S3, Google Cloud Storage, Azure, a folder or memory. The only place that imports a client.
- local_files.py: writes files that appear under their names only when complete.
- document_reading.py: reads a document twice before it counts as damaged.
- reading.py, verify.py: read `latest` and a checkpoint's documents, and check whether all its objects are complete.
- choice.py: finds the checkpoint that a person means.
- protocol/: everything that writes `latest`, commits, or deletes.
- diagnosis/: examines a place for runs, for `raycheck doctor` and `raycheck.fit`.
- assembly/: turns the ranks' reports into one checkpoint.
- stored_export.py: reads and deletes an exported directory of a run.
- history/: what a run was, beyond what `latest` lists: every commit, attempt, and metric of a step. For people.
- attempt_records.py, run_status.py: what each attempt was and cost; whether the run is still active.
"""
