"""Penstock keeps GPUs fed: memory-mapped shards, exact plans, and loading that keeps up.

Importing it imports nothing else: each name below arrives, with what it needs, when it is first used.
"""

from __future__ import annotations

import os

from penstock._version import __version__

# Written out, not computed: type checkers read it, and take nothing else for public.
__all__ = [
    "DataLoader",
    "Dataset",
    "DatasetWriter",
    "DecodeClip",
    "DecodeImage",
    "DecodeSound",
    "FunctionTransform",
    "IndexAudio",
    "IndexVideo",
    "IterableSource",
    "KeepColumns",
    "Plan",
    "Ragged",
    "Remote",
    "Schema",
    "Security",
    "SourceOptions",
    "Tokenize",
    "__version__",
    "advise",
    "concat",
    "errors",
    "from_arrays",
    "is_stale",
    "load_plan",
    "masks",
    "mix",
    "open",
    "prepare",
    "pure",
    "push",
    "serve",
    "stage",
    "stream",
    "tune",
    "verify",
    "watch",
]

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest; type checkers go by the name
if TYPE_CHECKING:
    from penstock import errors, masks
    from penstock.dataset import push, stage, verify
    from penstock.plan import Dataset, Plan, concat, from_arrays, load_plan, mix, pure
    from penstock.plan import open_dataset as open
    from penstock.preparation import is_stale, prepare
    from penstock.pytorch import DataLoader, stream
    from penstock.schema import Ragged, Schema
    from penstock.service import Remote, Security, serve
    from penstock.shards import DatasetWriter
    from penstock.sources import IterableSource, SourceOptions
    from penstock.transforms import (
        DecodeClip,
        DecodeImage,
        DecodeSound,
        FunctionTransform,
        IndexAudio,
        IndexVideo,
        KeepColumns,
        Tokenize,
    )
    from penstock.tuning import advise, tune
    from penstock.watching import watch
else:  # hidden from type checkers, to which a module with `__getattr__` has every name
    import importlib

    _HOME_OF_NAME = {
        "DataLoader": "penstock.pytorch",
        "Dataset": "penstock.plan",
        "DatasetWriter": "penstock.shards",
        "DecodeClip": "penstock.transforms",
        "DecodeImage": "penstock.transforms",
        "DecodeSound": "penstock.transforms",
        "FunctionTransform": "penstock.transforms",
        "IndexAudio": "penstock.transforms",
        "IndexVideo": "penstock.transforms",
        "IterableSource": "penstock.sources",
        "KeepColumns": "penstock.transforms",
        "Plan": "penstock.plan",
        "Ragged": "penstock.schema",
        "Remote": "penstock.service",
        "Schema": "penstock.schema",
        "Security": "penstock.service",
        "SourceOptions": "penstock.sources",
        "Tokenize": "penstock.transforms",
        "advise": "penstock.tuning",
        "concat": "penstock.plan",
        "from_arrays": "penstock.plan",
        "is_stale": "penstock.preparation",
        "load_plan": "penstock.plan",
        "mix": "penstock.plan",
        "open": "penstock.plan",
        "prepare": "penstock.preparation",
        "pure": "penstock.plan",
        "push": "penstock.dataset",
        "serve": "penstock.service",
        "stage": "penstock.dataset",
        "stream": "penstock.pytorch",
        "tune": "penstock.tuning",
        "verify": "penstock.dataset",
        "watch": "penstock.watching",
    }
    _MODULES = ("errors", "masks")
    _NAME_AT_HOME = {"open": "open_dataset"}

    def __getattr__(name):
        if name in _MODULES:
            return importlib.import_module(f"penstock.{name}")
        if name not in _HOME_OF_NAME:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME_OF_NAME[name]), _NAME_AT_HOME.get(name, name))
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)


if os.path.exists(f"{__path__[0]}/_dag.py"):  # a file of the other project with this import name; 2 us
    import warnings

    from penstock._version import NAMESAKE

    warnings.warn(NAMESAKE, RuntimeWarning, stacklevel=2)
