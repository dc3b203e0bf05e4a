"""Imports a checkpoint that something else than raycheck has written, as a new run with one checkpoint.

The source is hostile input, as a bucket is: nothing in it is unpickled but by torch's restricted loader, no file outside
of it is read, and it is wholly judged before anything is written. Bytes are always copied. A reference would need
checksums that no foreign format has, and would tie the run to files that their owner may delete.

- import_checkpoint.py is the public function. detection.py says what kind of source lies at an address.
- source_files.py reads the files of a source, on this machine or in a bucket. source_tensors.py describes its tensors,
  of which boxes are read one after another.
- One file per kind: torch_file.py, dcp_directory.py (with dcp_metadata_reading.py), hugging_face.py (with
  safetensors_file.py), lightning_file.py, rank_files.py, ray_train.py.
- entries.py turns the nested state into entries as raycheck saves them; parameter_order.py finds the names of an
  optimizer's numbered parameters.
- new_checkpoint.py stages, uploads and commits them, one shard after another.
"""
