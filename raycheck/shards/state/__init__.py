"""The state as a whole: gathered for a save, selected and applied at a restore, with random state and progress."""
