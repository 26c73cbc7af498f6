"""A table as text. It is never folded, even if wider than the terminal: cells must stay below their column's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class TextTable(NamedTuple):
    """Names of the columns, and rows of as many cells.

    >>> print(TextTable(("num_workers", "steps/s"), [("0", "41.3"), ("2", "133")]))
    num_workers  steps/s
              0     41.3
              2      133
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.header))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )
