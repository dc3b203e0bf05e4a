"""Saves and restores optimizers by the names of their parameters."""
