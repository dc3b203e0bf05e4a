"""Turns the ranks' reports into one checkpoint. The coordinator runs it; it imports no torch. In order of a save:

- role.py: the part of a group whose ranks alone have some of the entries.
- replica_agreement.py: which rank writes each replicated box, step 13.
- save_report.py: what a rank hands in, steps 13 and 14.
- numbers.py: the columns of plans as arrays of numpy.
- plan_cache.py: the ranks' plans, which are sent once, and the documents made from them, step 14.
- plan_merge.py: all ranks' plans as one, and the proof that every tensor is covered exactly once, step 16.
- dcp_metadata.py: torch DCP's own `.metadata`, for stock tools.
- assemble.py: makes index, `.metadata` and manifest, step 16. group/coordinator/protocol_calls.py writes them.
"""
