"""Archives: one checkpoint in one tar file.

- pack.py writes an archive, from a run to a file or a stream.
- unpack.py begins a new run from an archive.
- layout.py says what an archive consists of, and reads its headers, which are hostile.
- files.py opens the file or stream, and compresses it.
"""
