"""Datasets in object stores: which shards a run needs and when, the stores that have them, what a node keeps of them.

    open_store(url)          objects and ranges under one URL, through obstore or fsspec          _store
    connect(url)             the same for programs that may fork: the fetcher asks                _client
    Sender(store)            files on their way there, checked and counted                        _send
    Uses, choose_evictions   what to fetch next and what to evict, as pure functions              _uses
    simulate_cache           what a node would fetch, and how long it would wait                  _simulation
    Downloader               ranges of objects: in parallel, asked again, asked twice             _download
    Cache                    whole files on this node, within a budget, shared by its processes   _cache
    Fetcher                  the process that has the clients, and fetches ahead of runs          _fetcher
    RemoteFolder             a dataset, or some objects, in the cache, as any process sees it     _client

    reader ── a file is missing ──► RemoteFolder ── socket ──► Fetcher ── Downloader ──► Store
      ▲                                                           │
      └────────────── opens the file, by its name ◄── Cache ◄─────┘

May import: `errors`, `filesystem`, `native`, `workers`. Imported by: `cli`, `dataset`, `loader`, `plan`, `preparation`.
Holds state: the address of this process's fetcher, and the process if it started it.
"""

from penstock.remote._cache import Cache
from penstock.remote._client import RemoteFolder, connect, download, open_objects, open_remote
from penstock.remote._send import Parcel, Sender
from penstock.remote._simulation import CacheRun, most_in_use, simulate_cache
from penstock.remote._store import Head, Store, check_url, open_store
from penstock.remote._uses import NEVER, Uses, choose_evictions

__all__ = [
    "NEVER",
    "Cache",
    "CacheRun",
    "Head",
    "Parcel",
    "RemoteFolder",
    "Sender",
    "Store",
    "Uses",
    "check_url",
    "choose_evictions",
    "connect",
    "download",
    "most_in_use",
    "open_objects",
    "open_remote",
    "open_store",
    "simulate_cache",
]
