"""Each rank's side of a training: the Checkpointer and what it consists of.

`Checkpointer.restore` (checkpointer.py) claims the run and restores:

    singleton           refuses a second open Checkpointer of this run and rank
    group_restore       reads the checkpoint on all ranks together; on damage all of them take the one before
    restore_notices     says what has changed since the save, and which data begin anew
    live_attempt        begins here, and lasts until the end of training

`Checkpointer.end_step` runs LiveAttempt.end_step, which does this in order:

    training_progress   stop the clock, count the step, keep its metrics
    save_queue          take in which saves have been committed, or have failed
    heartbeat           find out whether the attempt is fenced, and whether the driver asks for a save
    save_triggers       decide whether to save now, and as what: each rank by itself for steps and epochs
    rank_zero_decision    ... by rank 0's broadcast for everything else: time, tokens, the user's function,
    young_daly            ... an interval from SaveSettings(overhead=...),
    preemption            ... and a node that is about to go
    save_queue          if so: copy the state to host memory, and hand it to the save thread; training goes on
    after_commit        if tasks follow its commit: wait as their modes say
    ports.Reporter      report the commit that rank 0 has named to whoever started the ranks
    heartbeat           tell the coordinator about once a second how far training is

What is uploaded when: the save thread (save_thread) has this rank's shards uploaded as soon as they are copied, one
save after the other, by itself or by its node's actor (node_uploads). Who uploads them also reports them to the
coordinator (upload_and_report). That commits the checkpoint once all ranks have reported (group/coordinator). Only
afterwards rank 0's save thread writes the small pointer object by which Ray knows the checkpoint (ports.Reporter).

`Checkpointer.close` saves the last step if it is not saved, waits for its commit, and writes into `latest` that the run
has finished. periodic.py is separate: it says when the script's own work is due.
"""
