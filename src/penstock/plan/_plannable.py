"""What a plan is built on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from penstock.rows import RowSource
from penstock.stages import Stage

Stages = tuple[Stage, ...]


class Plannable(Protocol):
    """What a plan is built on: a `Dataset`, or the `Mix` of several plans."""

    @property
    def fingerprint(self) -> str:
        """Identity of the data."""
        ...

    @property
    def tokenizers(self) -> dict[str, str]:
        """The tokenizers whose tokens it holds, as far as it says: name by digest."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels, as far as it says."""
        ...

    def build_rows(self, stages: Stages) -> RowSource:
        """The rows that these stages make of it."""
        ...

    def check_stage(self, stage: Stage) -> None:
        """Raise `StageError` for a stage that cannot follow it."""
        ...

    def select_columns(self, names: Iterable[str]) -> Plannable:
        """The same samples with only these columns."""
        ...

    def map_seed(self, stages: Stages) -> int:
        """What the generators of mapped functions derive from."""
        ...

    def order_facts(self, stages: Stages) -> dict[str, str]:
        """What decides the order of rows, fact by fact."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The source in a plan file; `ValueError` when a file cannot name it."""
        ...
