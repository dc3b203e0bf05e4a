"""Keeps one actor per node, which holds shards for its node's ranks, uploads them, and outlives the ranks.

- node_agents.py starts the actors; node_uploads.py is the actor, and a rank's way to it.
- memory_saves.py and memory_shards.py: a rank's side of a memory checkpoint, and of a restore from one.
- memory_checkpoints.py: the coordinator's side.
"""
