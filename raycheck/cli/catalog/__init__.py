"""Commands that work with many runs in one bucket: one file per topic."""
