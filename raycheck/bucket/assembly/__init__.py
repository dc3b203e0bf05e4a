"""The ranks' reports become one checkpoint: plans merged, replicas agreed on, documents written.

The coordinator runs it; it imports no torch.
"""
