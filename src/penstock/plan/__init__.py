"""Datasets and what is built on them: which samples, in which order, make which batch.

Pure functions over shards: no threads, no torch, no state between calls.
May import: `shards`, `order`, `packing`, and the lines under them. Imported by: `loader`, `pytorch`, `cli`.
"""

from penstock.plan._dataset import Dataset
from penstock.plan._open import from_arrays, open_dataset

__all__ = ["Dataset", "from_arrays", "open_dataset"]
