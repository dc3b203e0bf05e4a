"""raycheck with Ray: everything that happens in the driver and in the workers of a training.

fit             raycheck.fit: trainer.fit() with a coordinator in the driver
driver_signals  saves when the driver gets SIGTERM or SIGUSR1
worker/         each rank: the Checkpointer, when it saves, its uploads, its part in a restore
actors/         ActorCheckpointer: the same for groups of Ray actors, without Ray Train
coordinator/    one actor per run that commits what the ranks report, and decides for all of them
group           a rank's place in its group, and its way to the coordinator
batches         Batches, the stream of training data that goes on after a restore; data/ has its pieces
ray_api/        every name of Ray's that may change
log             the logger, and the one shape of its lines
"""
