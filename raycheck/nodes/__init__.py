"""Beside Ray on a preemptible node: the cloud's notice that the machine is about to go becomes Ray's drain of the node.

Nothing in open-source Ray asks the clouds. Once the node is drained, Ray Train tells all ranks, and raycheck saves.
"""
