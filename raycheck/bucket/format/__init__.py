"""Defines the contents of a run's objects, as values and as bytes. Accesses no store. In the order of FORMAT.md:

- object_keys.py: every key, and a checkpoint's name.
- document.py: JSON documents with a format version and a checksum. Their classes are in latest.py, manifest.py and
  ray_pointer.py.
- index.py: the index as a value. index_codec.py, plan_codec.py, column_codec.py: the index as bytes. decompression.py:
  the limits within which these are decompressed.
- values.py: Python values as JSON without pickle. library_values.py: those of the standard library, NumPy and torch.
  class_values.py: those of a user's own classes.
- label.py: what a save may set on its checkpoint: name, note and expiry.
- checksum.py: CRC-32. progress.py: the progress counters of a training.
"""
