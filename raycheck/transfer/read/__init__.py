"""Copies shards into live tensors; see raycheck/transfer for the order of the files."""
