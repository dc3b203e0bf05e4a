"""Fixtures of the adapters' tests: the Ray that tests/train has too."""

from tests.train.conftest import cluster

__all__ = ["cluster"]
