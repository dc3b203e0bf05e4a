"""Stores: the only place that touches a store client. One small file per backend, all held to `interface.Store`."""

from raycheck.bucket.store.interface import Got, Listed, Store, Upload
from raycheck.bucket.store.open import open_store

__all__ = ["Got", "Listed", "Store", "Upload", "open_store"]
