"""Tensors to shard objects and back: staging, record framing, reuse of what is in the bucket, ranged reads."""
