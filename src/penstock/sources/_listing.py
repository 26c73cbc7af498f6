"""Which files a source means. (Being written.)"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from penstock.sources._model import SourceFile
from penstock.sources._options import SourceOptions


def list_files(sources: str | os.PathLike[str] | Sequence[Any] | Any, options: SourceOptions) -> list[SourceFile]:
    """Files that `sources` means, sorted by name."""
    raise NotImplementedError
