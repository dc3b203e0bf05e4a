"""Starts a Ray for test_drain.py in a process of its own: a head and one busy node.

It prints what they are, and then, for every line that it reads, the draining nodes with their deadlines. It ends at the
end of its input. The session's other Ray tests have a Ray already, and a process can have only one.
"""

import json
import logging
import sys

import ray
from ray._private.state import state
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SMALL = {"num_cpus": 1, "object_store_memory": 80_000_000}


@ray.remote(num_cpus=1)
class Busy:
    """Keeps its node busy: an idle one ends as soon as it is drained."""

    def ping(self) -> None:
        pass


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
    node = cluster.add_node(**SMALL)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    busy = Busy.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote()
    ray.get(busy.ping.remote(), timeout=60)
    tell({"address": cluster.address, "head": cluster.head_node.node_id, "node": node.node_id})
    for _ in sys.stdin:
        tell(state.get_draining_nodes())
    ray.shutdown()
    cluster.shutdown()


def tell(what: object) -> None:
    print("=", json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
