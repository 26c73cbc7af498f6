"""Data that is already in this process. (Being written.)"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterableSource:
    """Any Python iterable of dicts, read in order in this process."""

    records: Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
    name: str = "iterable"
    identity: str = ""
