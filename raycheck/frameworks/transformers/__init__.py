"""Saves and restores training with the transformers Trainer, and with the TRL trainers built on it.

prepare            the call for scripts: refuses what cannot work, and changes the trainer's class
trainer_settings   one SaveSettings from the script's settings and the Trainer's arguments
refusals           what is refused by name before the first step
resumable_trainer  that class: the methods of Trainer that it replaces
trainer_run        one call of train(): its Checkpointer, and the order of events
training_data      the stream of batches behind the loader that the Trainer expects
generation_data    the same stream for TRL's GRPO, whose batches are prompts to generate from
trainer_values     counts kept by the Trainer and its callbacks, as entries of the state
unsaved_counts     a warning about counts in callbacks that no save contains
"""

from raycheck.frameworks.transformers.prepare import prepare

__all__ = ["prepare"]
