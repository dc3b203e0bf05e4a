"""The stores, one small file per backend, all of which implement `interface.Store`. Nothing else touches a store
client."""

from raycheck.bucket.store.interface import Got, Listed, Store, Upload
from raycheck.bucket.store.open import open_store

__all__ = ["Got", "Listed", "Store", "Upload", "open_store"]
