"""Datasets in object stores: which shards a run needs and when, and the stores that have them.

    Uses, choose_evictions   what to fetch next and what to evict, as pure functions              _uses
    open_store(url)          objects and ranges under one URL, through obstore or fsspec          _store

May import: `errors`. Imported by: `plan`. Holds no state.
"""

from penstock.remote._store import Head, Store, check_url, is_url, open_store
from penstock.remote._uses import NEVER, Uses, choose_evictions

__all__ = ["NEVER", "Head", "Store", "Uses", "check_url", "choose_evictions", "is_url", "open_store"]
