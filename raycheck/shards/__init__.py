"""Moves live training state to objects in a store and back. Knows torch and bucket/, and does not know Ray.

entries/ turns each object of the user's state into an entry with named tensors and values. state/ gathers all entries
for a save, and compares and applies a checkpoint at a restore. transfer/ copies tensors to shard objects and back.
huggingface/ exports checkpoints.
"""
