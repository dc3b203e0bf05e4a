"""Reaches Azure Blob Storage, through adlfs."""
