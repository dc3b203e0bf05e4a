"""Runs next to Ray on a preemptible node, and turns the cloud's preemption notice into a Ray drain of the node.

Open-source Ray does not ask the clouds. Once the node is being drained, the group's ranks get a notice from Ray
(api/preemption_notices.py), and raycheck saves (group/worker/preemption.py).

- watch.py is the loop that asks and drains.
- cloud_notices.py reads what each cloud's metadata service answers; metadata_service.py sends one request to it.
- drain.py finds this machine's node in Ray and drains it.
"""
