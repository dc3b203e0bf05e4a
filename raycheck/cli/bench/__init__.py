"""`raycheck bench` measures how fast a bucket is from this machine, and counts what a checkpoint costs in requests."""
