"""Imports a checkpoint written by another program as a new run with one checkpoint.

The source is untrusted input, like a bucket: it is unpickled only by a restricted loader, no file outside it is read,
and its form is fully validated before anything is written. Bytes are always copied. A reference would need checksums
that no foreign format has, and would tie the run to files that their owner may delete.

- import_checkpoint.py is the public function. detection.py determines the kind of source at an address.
- source_files.py reads the files of a source, on this machine or in a bucket. source_tensors.py describes its tensors,
  of which boxes are read one after another.
- One file per kind: single_file.py (what torch_file.py loads, also Lightning's), dcp_directory.py (with
  dcp_metadata_reading.py), hugging_face.py (with safetensors_file.py), rank_files.py. ray_train.py finds one of these
  in an experiment. Each makes a SourceState of state_in_source.py.
- entries.py turns the nested state into entries as raycheck saves them: all of a DCP directory, and of other sources
  the weights. optimizer_forms.py reads an optimizer's state, if the source names its parameters.
- new_checkpoint.py stages, uploads and commits them, one shard after another.
"""
