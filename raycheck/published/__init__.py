"""Publishes a run's weights as a series of versions, and follows such a series into a local folder.

A version is a Hugging Face directory. In the bucket it is whole, or a patch of the version before it, or both. The
publisher and the reader are one: both keep the newest version in a local folder and turn it into the next one.
FORMAT.md, steps 42 to 46, is the specification.

- records.py: the documents in the bucket.
- element_patch.py: the changed elements of one tensor, as bytes.
- weights_file.py: the header of a safetensors file, and its tensors' bytes.
- file_patch.py: the patches of all tensors of one file, as safetensors files.
- series.py: the list of versions, which is replaced by compare-and-swap; retention, and the leases of readers.
- version_folder.py: a local folder with versions, of which each is complete.
- pull.py: makes the newest version in that folder, from the one that is there or from a whole one.
- publish.py: writes a checkpoint as the next version.
- follower.py: what `raycheck.follow` returns.
"""
