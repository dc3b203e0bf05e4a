"""A group of ranks that saves and restores together. It does not know who started the ranks.

group.py        a rank's place in its group, and its calls to the coordinator
ports.py        what ranks need of the system that started them; coordinator/cluster.py: what a coordinator needs
worker/         each rank: the Checkpointer, when it saves, its uploads, its part in a restore
coordinator/    one per run: commits what the ranks report, and decides for all of them
served_group    a coordinator in rank 0's process, which all ranks call over TCP, for torchrun
"""
