"""How far a preparation is that has not finished, for whoever finds it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.preparation._work import WorkFolder

_PASSES = {"deal": "the first pass of two, ", "gather": "the second pass of two, "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A preparation that is at work, or was stopped; the next run with the same arguments goes on with it."""

    stage: str
    """"prepare"; with `shuffle` first "deal", then "gather"."""
    tasks: int
    """Tasks that are finished."""
    total_tasks: int
    raw_bytes: int
    """Bytes that the finished tasks have read, about."""
    total_bytes: int
    samples: int
    """Samples that they have made."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        share = 100 * self.raw_bytes // max(1, self.total_bytes)
        return (
            f"{_PASSES.get(self.stage, '')}{self.tasks:,} of {self.total_tasks:,} tasks finished, "
            f"{share} % of the data, {self.samples:,} samples"
        )


def find_unfinished(destination: str | os.PathLike[str]) -> Unfinished | None:
    """How far the preparation of a dataset is; None when none is unfinished there."""
    work = WorkFolder(Path(destination).absolute())
    noted = work.noted_tasks()
    if noted is None:
        return None
    stage, tasks = noted
    finished = work.records(tasks)
    return Unfinished(
        stage=stage,
        tasks=len(finished),
        total_tasks=len(tasks),
        raw_bytes=sum(tasks[key] for key in finished),
        total_bytes=sum(tasks.values()),
        samples=sum(record.num_samples for record in finished.values()),
    )
