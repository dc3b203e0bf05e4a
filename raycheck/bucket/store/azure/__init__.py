"""Azure Blob Storage, through adlfs."""
