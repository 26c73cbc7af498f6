"""Sentences that a person should see after a run, about what was not read."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any

from penstock.preparation._earlier import Earlier
from penstock.sources import SourceFile, SourceOptions, changed_since, list_passed_over

_SHOWN_KINDS = 5


def note_passed_over(sources: Any, reading: SourceOptions) -> list[str]:
    """A sentence when folders hold more than was read, by the names of the files."""
    paths = list_passed_over(sources, reading)
    if not paths:
        return []
    kinds = collections.Counter(os.path.splitext(path)[1].lower() or "no suffix" for path in paths)
    shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_SHOWN_KINDS))
    return [
        f"Passed over in folders, for their names tell no format that is read: {shown} ({_such_as(paths)}). "
        "If they are data, give them as paths with reading=SourceOptions(format=…), or --format."
    ]


def note_gone(earlier: Earlier | None, files: Sequence[SourceFile]) -> list[str]:
    """A sentence when files that an earlier run prepared are no longer among the sources."""
    given = {file.path for file in files}
    gone = [path for path, *_ in earlier.sources if path not in given] if earlier is not None else []
    if not gone:
        return []
    return [
        f"{len(gone):,} source files of before are not among the sources now ({_such_as(gone)}): their samples left "
        "the dataset. To add to it, give all sources, old and new."
    ]


def note_changes(files: Sequence[SourceFile]) -> list[str]:
    """A sentence when sources did not keep still; the dataset names them as they were listed, so a rerun reads them."""
    changed = changed_since(files)
    return (
        [f"{len(changed):,} source files changed during the run ({_such_as(changed)}). Run it again."]
        if changed
        else []
    )


def _such_as(paths: Sequence[str]) -> str:
    return paths[0] + (", …" if len(paths) > 1 else "")
