"""raycheck with Ray: everything that names Ray.

- fit.py: raycheck.fit, trainer.fit() with a coordinator in the driver. driver_signals.py: saves when the driver gets
  SIGTERM or SIGUSR1.
- ray_host.py, ray_group.py, ray_cluster.py: a group's ports with Ray: what started this process, a rank's place, and
  what a coordinator has.
- api/: every name of Ray's that may change between releases.
- actors/: ActorCheckpointer, the same for groups of Ray actors, without Ray Train.
- nodes/: an actor on each node that uploads for its ranks, and keeps memory checkpoints.
- reports/: reports to Ray: its Results, and its metrics.
- node_findings.py: what `raycheck doctor` finds out on each node.
- ray_tasks.py: runs the tasks that follow a commit.
- version_copies.py: published versions in the object store, for samplers of the same cluster.
- data/: RayData, positions in a Ray Dataset.
- watch_node/: `raycheck watch-node`, which turns a cloud's preemption notice into Ray's drain of the node.
  api/preemption_notices.py: where a group receives that notice.
"""
