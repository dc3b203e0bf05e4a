"""Stores: the only place that touches a store client. One small file per backend, all held to `base.Store`."""

from raycheck.bucket.store.base import Got, Listed, Store, Upload
from raycheck.bucket.store.uri import open_store

__all__ = ["Got", "Listed", "Store", "Upload", "open_store"]
