"""Saves and restores trainings of the Trainer of transformers, and of the trainers of TRL that are built on it.

prepare            what a script calls: refuses what cannot work, and gives the trainer another class
trainer_settings   one SaveSettings from the script's own and from the Trainer's arguments
refusals           what is refused by name, before the first step
resumable_trainer  that class: the methods of Trainer that it replaces
trainer_run        one call of train(): its Checkpointer, and what comes when
training_data      the stream of batches behind a loader as the Trainer expects it
generation_data    the same for TRL's GRPO, whose batches are prompts to generate from
trainer_values     what the Trainer and its callbacks count, as entries of the state
unsaved_counts     a warning of what callbacks count and no save has
"""

from raycheck.frameworks.transformers.prepare import prepare

__all__ = ["prepare"]
