"""`raycheck doctor`: what a bucket is like, before anybody trusts it with a month of training.

- examine.py: the public `examine_bucket`, which makes all checks in order.
- speed.py: latency, throughput with raycheck's own data path, and throttling.
- plan.py: the saves of a training, what they cost here, and how often to save.
"""
