"""Holds the commands over whole runs, one file per topic."""
