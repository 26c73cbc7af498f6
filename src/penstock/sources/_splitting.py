"""How files are cut. (Being written.)"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.sources._model import SourceFile, Split
from penstock.sources._options import SourceOptions


def class_names(files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Image classes in the order of their numbers."""
    return tuple(sorted({file.class_name for file in files if file.class_name}))


def plan_splits(files: Sequence[SourceFile], options: SourceOptions, target_bytes: int) -> list[Split]:
    """Splits of about `target_bytes` that together hold every record of `files` once."""
    raise NotImplementedError
