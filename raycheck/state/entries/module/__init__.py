"""Saves and restores modules, whatever they are wrapped in, under the names of the plain model."""
