"""A long benchmark in pieces: each measurement is kept in a file, and one that is there is not made again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Measurements:
    """Measurements by name.

    Args:
        path: Where they are kept, one JSON line each; None keeps nothing.
        minutes: None is begun after this time: the benchmark ends, and the same command continues it.
    """

    def __init__(self, path: str | None, minutes: float | None) -> None:
        self._path = None if path is None else Path(path)
        self._ends_at = None if minutes is None else time.monotonic() + 60 * minutes
        lines = self._path.read_text().splitlines() if self._path is not None and self._path.exists() else []
        self._known: dict[str, Any] = dict(json.loads(line) for line in lines)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The measurement of this name: the one that is kept, or a new one. It must be plain data."""
        if name in self._known:
            return self._known[name]
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            print(f"{len(self._known):,} measurements so far; the same command continues.")
            sys.exit(0)
        found = self._known[name] = measure()
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, found]) + "\n")
        return found
