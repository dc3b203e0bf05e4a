"""Optimizers as entries of the state, keyed by the names of their parameters."""
