"""Datasets in object stores: which shards a run needs and when, and the stores that have them.

    Uses, choose_evictions   what to fetch next and what to evict, as pure functions              _uses
    open_store(url)          objects and ranges under one URL, through obstore or fsspec          _store
    connect(url)             the same for programs that fork: the client in a process of its own  _apart
    Sender(store)            files on their way there, checked and counted                        _send

May import: `errors`, `workers`. Imported by: `dataset`, `plan`, `preparation`. Holds no state.
"""

from penstock.remote._apart import connect
from penstock.remote._send import Parcel, Sender
from penstock.remote._store import Head, Store, check_url, is_url, open_store
from penstock.remote._uses import NEVER, Uses, choose_evictions

__all__ = [
    "NEVER",
    "Head",
    "Parcel",
    "Sender",
    "Store",
    "Uses",
    "check_url",
    "choose_evictions",
    "connect",
    "is_url",
    "open_store",
]
