"""The history of a run: what was, for people. Of the protocol, only a repair reads it. Losing it loses no checkpoint.

metric_rows   the metrics of steps, as a value: union, thinning, and columns of bytes
facts         everything that is known of a run's past, as a value: a set of records with keys
segments      reads, writes and merges the objects that contain facts. Step 41
attempt_facts what `latest` and `attempts/` say, as facts
"""
