"""Shards: from live training state to objects in a store and back. Knows torch and bucket/; no Ray."""
