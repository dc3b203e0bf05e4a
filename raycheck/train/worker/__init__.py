"""One rank's side of a training: the Checkpointer, when it saves, its uploads, and its part in a restore."""
