"""Checkpointing for groups of Ray actors that a driver leads, without Ray Train.

actor_checkpointer  ActorCheckpointer: the driver's side; it decides when to save
driver_state        the driver's part of the state: its own objects, and the states of other actors
actor_rank          the side of each actor: one rank, with a Checkpointer inside
actor_state         RemoteState and ActorState: a Ray actor's state as an entry of a state
"""
