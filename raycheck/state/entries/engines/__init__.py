"""Training engines, which keep the weights that they train, and their optimizer state, in their own flat memory.

deepspeed.py presents an engine of DeepSpeed as a module and an optimizer, which are saved and resharded like any
others. refusals.py recognizes what cannot be saved so, and refuses it by name.
"""
