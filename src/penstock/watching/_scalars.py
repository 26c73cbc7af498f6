"""Scalars for TensorBoard, Weights & Biases, MLflow and the like: one callable, every few steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from penstock.metrics import Sampler
from penstock.watching._steps import COLUMNS, StepRow

Log = Callable[[Mapping[str, float], int], object]

_OF_STEPS = {
    "wait": "data/wait_seconds",
    "step": "data/step_seconds",
    "transfer": "data/transfer_seconds",
    "delay": "data/no_core_seconds",
    "major_faults": "data/major_faults",
    "queued": "data/batches_ready",
}


class Scalars:
    """Collects steps and hands their means to `log`. What was not measured is left out."""

    def __init__(self, log: Log, every: int, sampler: Sampler | None) -> None:
        self._log, self._every, self._sampler = log, every, sampler
        self._rows: list[StepRow] = []

    def add(self, row: StepRow, num_steps: int) -> None:
        """One more step, of so many in all."""
        self._rows.append(row)
        if len(self._rows) >= self._every:
            rows, self._rows = self._rows, []
            scalars = {**_of_steps(rows), **({} if self._sampler is None else _of_machine(self._sampler))}
            self._log({name: value for name, value in scalars.items() if math.isfinite(value)}, num_steps)


def _of_steps(rows: list[StepRow]) -> dict[str, float]:
    table = np.array(rows)
    is_known = np.isfinite(table)
    means = np.where(is_known, table, 0).sum(axis=0) / np.where(is_known.any(axis=0), is_known.sum(axis=0), np.nan)
    scalars = {name: float(means[COLUMNS[column]]) for column, name in _OF_STEPS.items()}
    both = scalars["data/wait_seconds"] + scalars["data/step_seconds"]
    return {"data/wait_share": scalars["data/wait_seconds"] / both, "data/steps_per_second": 1 / both, **scalars}


def _of_machine(sampler: Sampler) -> dict[str, float]:
    """Between the last two readings."""
    usage = sampler.history(last=2)
    if len(usage.time_seconds) < 2:
        return {}
    seconds = float(np.diff(usage.time_seconds)[0])
    training, workers, machine, read = (
        float(np.diff(column)[0]) / seconds
        for column in (
            usage.root_cpu_seconds,
            usage.children_cpu_seconds,
            usage.machine_busy_seconds,
            usage.read_bytes,
        )
    )
    return {
        "machine/training_cores": training,
        "machine/worker_cores": workers,
        "machine/other_cores": max(0.0, machine - training - workers),
        "machine/read_bytes_per_second": read,
        "machine/resident_bytes": float(usage.rss_bytes[-1]),
        "accelerator/utilization": float(usage.accelerator_utilization[-1]),
        "accelerator/memory_bytes": float(usage.accelerator_memory_bytes[-1]),
    }
