"""Contains every use of Ray names that may change between releases; the rest of raycheck uses only stable names.

It is tested on Ray 2.60; 2.51 is the oldest supported release (tests/elastic/test_oldest.py runs on it). If a name is
missing, a feature is left out. What is unstable, and where it is used:

    train_context.py         the worker's train context, NO_UPLOAD reports
    preemption_notices.py    preemption info, draining nodes
    controller_callbacks.py  controller and worker group callbacks, the controller's callback list, CheckpointManager
    datasets.py              the dataset manager, and what it holds
    failure_causes.py        the wrappers around a worker's error
    trainer_checks.py        Ray Client, relax_collectives_on_preemption, the placement group table
    tune_session.py          Ray Tune's session in a trial's process
    run_location.py          the storage path and file system of a RunConfig
    calls.py                 __ray_call__, and errors as Ray's calls raise them
"""
