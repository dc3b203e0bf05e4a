"""Runs beside Ray on a preemptible node, and turns the cloud's preemption notice into Ray's drain of the node.

Nothing in open-source Ray asks the clouds. Once the node is drained, Ray Train tells all ranks, and raycheck saves.

- watch.py is the loop that asks and drains.
- cloud_notices.py knows what each cloud's metadata service answers; metadata_service.py is one request to it.
- drain.py finds this machine's node in Ray and drains it.
"""
