"""Saves and restores the state as a whole, including the random state and the progress that raycheck adds to it.

train_state.py gathers and stages for a save, and runs a restore: restore_selection.py records what the caller selected,
restore_matching.py compares the checkpoint with the live state, restore_reading.py reads and proves, and
restore_result.py reports. deferred_tensors.py has an optimizer's tensors read later, if the caller wants. preview.py
reads a checkpoint before anything is restored. At the first save, replica_checksums.py and rank_buffers.py compare the
ranks. left_out.py names what no checkpoint would contain, and changed_attributes.py names what training changes outside
the state.
"""
