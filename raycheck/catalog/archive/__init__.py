"""Archives: one checkpoint in one tar file.

- pack.py writes an archive, from a run to a file or a stream.
- unpack.py creates a new run from an archive.
- layout.py defines the contents of an archive.
- tar.py writes and reads tar files, whose headers are untrusted; the Tinker server's downloads use it too.
- files.py opens and compresses the file or stream.
"""
