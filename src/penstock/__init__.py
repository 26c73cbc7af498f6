"""Penstock keeps GPUs fed: memory-mapped shards, exact plans, and loading that keeps up.

Importing it imports nothing else: each name below arrives, with what it needs, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock._version import __version__

if TYPE_CHECKING:
    from penstock import errors as errors
    from penstock import masks as masks
    from penstock.plan import Dataset as Dataset
    from penstock.plan import Plan as Plan
    from penstock.plan import from_arrays as from_arrays
    from penstock.plan import load_plan as load_plan
    from penstock.plan import mix as mix
    from penstock.plan import open_dataset as open  # noqa: F401
    from penstock.plan import pure as pure
    from penstock.preparation import DecodeImage as DecodeImage
    from penstock.preparation import FunctionTransform as FunctionTransform
    from penstock.preparation import KeepColumns as KeepColumns
    from penstock.preparation import Tokenize as Tokenize
    from penstock.preparation import is_stale as is_stale
    from penstock.preparation import prepare as prepare
    from penstock.pytorch import DataLoader as DataLoader
    from penstock.pytorch import stream as stream
    from penstock.schema import Ragged as Ragged
    from penstock.schema import Schema as Schema
    from penstock.shards import DatasetWriter as DatasetWriter
    from penstock.shards import verify as verify
    from penstock.sources import SourceOptions as SourceOptions

_HOME_OF_NAME = {
    "DataLoader": ("penstock.pytorch", "DataLoader"),
    "Dataset": ("penstock.plan", "Dataset"),
    "DatasetWriter": ("penstock.shards", "DatasetWriter"),
    "DecodeImage": ("penstock.preparation", "DecodeImage"),
    "errors": ("penstock.errors", None),
    "from_arrays": ("penstock.plan", "from_arrays"),
    "FunctionTransform": ("penstock.preparation", "FunctionTransform"),
    "is_stale": ("penstock.preparation", "is_stale"),
    "KeepColumns": ("penstock.preparation", "KeepColumns"),
    "load_plan": ("penstock.plan", "load_plan"),
    "masks": ("penstock.masks", None),
    "mix": ("penstock.plan", "mix"),
    "open": ("penstock.plan", "open_dataset"),
    "Plan": ("penstock.plan", "Plan"),
    "prepare": ("penstock.preparation", "prepare"),
    "pure": ("penstock.plan", "pure"),
    "Ragged": ("penstock.schema", "Ragged"),
    "Schema": ("penstock.schema", "Schema"),
    "SourceOptions": ("penstock.sources", "SourceOptions"),
    "stream": ("penstock.pytorch", "stream"),
    "Tokenize": ("penstock.preparation", "Tokenize"),
    "verify": ("penstock.shards", "verify"),
}

__all__ = [*_HOME_OF_NAME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    module_name, attribute = _HOME_OF_NAME[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
