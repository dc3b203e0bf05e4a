"""`raycheck bench`: how fast a bucket is from this machine, and what a checkpoint costs in requests."""
