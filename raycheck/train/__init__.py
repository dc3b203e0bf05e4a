"""Ray: the coordinator actor, the workers' Checkpointer, the data stream, and `fit`."""
