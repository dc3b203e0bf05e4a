"""Keeps one actor per node, which holds shards for its node's ranks, uploads them, and outlives the ranks.

node_uploads.py is the actor, and a rank's access to it; memory_shards.py holds shards in its memory, and reads them in
a restore.
"""
