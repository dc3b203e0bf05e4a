"""Archives: one checkpoint in one tar file.

- pack.py writes an archive, from a run to a file or a stream.
- unpack.py begins a new run from an archive.
- layout.py says what an archive consists of.
- tar.py makes and reads the tar file, whose headers are hostile; the Tinker server's downloads are made by it as well.
- files.py opens the file or stream, and compresses it.
"""
