"""The bucket: keys, documents, stores, and the protocol that makes a checkpoint visible. See FORMAT.md.

Knows the standard library and store clients; neither torch nor ray.
"""
