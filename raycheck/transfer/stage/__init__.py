"""Copies live tensors into shard objects; see raycheck/transfer for the order of the files."""
