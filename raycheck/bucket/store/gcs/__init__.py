"""Reaches Google Cloud Storage, through gcsfs."""
