"""Each rank's side of a training: the Checkpointer and its parts.

`Checkpointer.restore` (checkpointer.py) claims the run and restores:

    singleton           refuses a second open Checkpointer of this run and rank
    data_proof          compares what the ranks know of their data
    slow_progress       tells the coordinator how far this rank is, if reading takes long
    group_restore       reads the checkpoint on all ranks together; on damage, all of them use the one before
    base_run            refers to frozen parameters that the base run has
    restore_notices     logs what has changed since the save, and which data starts over
    live_attempt        begins here, and lasts until the end of training

`Checkpointer.end_step` runs LiveAttempt.end_step, which does this in order:

    metric_values       refuse metrics that are not numbers
    training_progress   stop the clock, count the step
    step_metrics        keep them also for the history, until the next save's report takes them
    save_queue          find out which saves have been committed, or have failed
    heartbeat           find out whether the attempt is fenced, and whether the driver asks for a save
    save_triggers       decide whether to save now, and as what: each rank alone for steps and epochs
    rank_zero_decision    ... by rank 0's broadcast for everything else: time, tokens, the user's function,
    young_daly            ... an interval from SaveSettings(overhead=...),
    preemption            ... and a node that is about to be taken away
    save_queue          if so: copy the state to host memory, and pass it to the save thread; training continues
    after_commit        if tasks follow its commit: wait as their modes say
    ports.Reporter      report the commit that rank 0 has named to whoever started the ranks
    heartbeat           tell the coordinator about once a second how far training is

What is uploaded when: as soon as this rank's shards are copied, the save thread (save_thread) has them uploaded, one
save after the other, by the rank itself or by its node's actor (ports.NodeSink). Whichever uploads them also reports
them to the coordinator (upload_and_report), which commits the checkpoint once all ranks have reported
(group/coordinator). Only then does rank 0's save thread write the small pointer object by which Ray knows the
checkpoint (ports.Reporter). A memory checkpoint (memory_saves) is a save with another sink, and takes the same path
through a second save thread, so that neither waits for the other.

`Checkpointer.close` saves the last step if it is not saved, waits for its commit, and writes into `latest` that the run
has finished. periodic.py is separate: it decides when the script's own work is due.
"""
