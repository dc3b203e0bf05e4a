"""Reaches Amazon S3 and compatible stores through s3fs, and through obstore where the extra `fast` is installed."""
