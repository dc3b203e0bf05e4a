"""Modules as entries of the state, whatever they are wrapped in, under the names of the plain model."""
