"""Checkpointing for groups of Ray actors that a driver leads, without Ray Train."""
