"""Keeps a run in a bucket: its keys and documents, the stores, and the protocol that makes a checkpoint visible.

It knows the standard library and store clients, neither torch nor ray. FORMAT.md is the specification. In order:

- format/: what an object holds, as a value and as bytes. Talks to no store.
- store/: one interface to S3, Google Cloud Storage, Azure, a folder or memory. The only place that imports a client.
- document_reading.py: reads a document twice before it counts as damaged.
- reading.py, verify.py: read `latest`, a checkpoint's documents, and whether all its objects are whole.
- protocol/: everything that writes `latest`, commits, or deletes.
- assembly/: turns the ranks' reports into one checkpoint.
- attempt_records.py, run_status.py: what each attempt was and cost; whether the run is still going on.
"""
