"""Reads one split. (Being written.)"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.sources._model import Records, Split
from penstock.sources._options import SourceOptions


def read_split(split: Split, options: SourceOptions) -> Iterator[Records]:
    """Records of one split, in order."""
    raise NotImplementedError
