"""Moves tensors into shard objects and back: one object per rank and component.

A tensor's bytes pass through these files when they are saved:

1. gather_cache.py: finds the live tensors again at each save, without gathering the whole state.
2. local_box.py: describes the box of each tensor that this rank holds, and chooses the boxes that it writes.
3. incremental_upload.py: decides for each component whether to stage its boxes, or to refer to equal ones that are
   already in the bucket (tensor_digest.py detects whether a tensor was written to).
4. stager.py: copies the boxes into one host buffer (host_buffer.py), which is the shard object itself. If the host has
   no memory for that, the upload copies them slice by slice while training waits (live_slices.py).
   collector_pause.py keeps Python's garbage collector from running while all this makes one object per tensor.
5. torch_record.py: frames each box's bytes, so that stock torch can load them. stock_torch_names.py adds the names
   under which stock torch looks for an optimizer's state.
6. shard.py: records where each box is in the shard, for the checkpoint's index.
7. staged_shard.py: yields the object in parts, and computes its checksums on the way.

They pass through these files when they are restored:

8. reader.py: fetches ranges of the shards, checks them, and copies them into the live tensors.
9. replica_broadcast.py: lets one rank read a replica and broadcast it to the others.
10. aliased_tensors.py: restores tensors whose elements share memory. restore_proof.py: proves that all bytes
    arrived.
"""
