"""The coordinator: one per driver and run, it turns the ranks' reports into commits. With Ray it is an actor.

What happens, and which module does it:

    a save        actor.report gathers the ranks' reports (rendezvous.py); protocol_calls.conclude assembles and commits
                  them; run_log.py logs the commit; history_writer.py writes it, with the metrics
                  of the steps before it, into the history; background_deletes.py prunes; commit_tasks.py runs
                  the tasks that follow it (export_task.py), in Ray tasks if there is Ray. The reports of a memory
                  checkpoint take the same path, and memory_checkpoints.conclude lists it.
                  Before the first save, and after a failed one, actor.agree has the ranks compare their replicas.
    a restore     actor.claim makes the group the live attempt (protocol_calls.claim), which names one checkpoint.
                  actor.restored waits until all ranks have restored it, or goes back when it is damaged. base_calls.py
                  answers ranks that ask for a base run.
                  While a save or a restore takes long, slow_ranks.py finds the rank for which the others wait.
    a preemption  the ranks decide without the coordinator (worker/preemption.py). A save that a signal, or Ray before
                  a resize, asks for waits in requested_saves.py and reaches rank 0 as the answer to its heartbeat.
    a death       of a rank: Ray starts a new group, which claims; lost_work.py and run_log.py report what that cost.
                  Before it claims, a save that the nodes upload is finished without the ranks (node_agents.py).
                  of the coordinator: Ray starts it again, empty, and actor takes the attempt over at the first call.
                  of the driver: the coordinator dies too; the next driver's claim fences it (bucket/protocol).
    the end       actor.finish waits for all ranks, and writes into `latest` that the run has finished.

messages.py defines what is sent; cluster.py is what there may be of Ray. Nothing here is the source of truth: only
`latest` is.
"""
