"""What was seen from outside: processors and memory of the job and of everything else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.metrics import MachineFacts, Sampler, UsageHistory, describe_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of the whole run."""

    machine: MachineFacts
    history: UsageHistory | None
    job_cores: float
    """Mean processors' worth of time that the script and its workers used."""
    other_cores: float
    """And everything else on the machine."""

    def cores(self) -> dict[str, float]:
        """Who used how many, for a recording."""
        return {"job_cores": self.job_cores, "other_cores": self.other_cores}


def summarise_usage(sampler: Sampler) -> Usage:
    """Means over the run; 0 where nothing could be read."""
    history = sampler.history()
    job, machine = 0.0, 0.0
    if len(history.time_seconds) > 1:
        seconds = float(history.time_seconds[-1] - history.time_seconds[0])
        used = history.root_cpu_seconds + history.children_cpu_seconds
        job = float(used[-1] - used[0]) / max(seconds, 1e-9)
        machine = float(history.machine_busy_seconds[-1] - history.machine_busy_seconds[0]) / max(seconds, 1e-9)
    others = max(0.0, machine - job) if np.isfinite(machine) else 0.0
    return Usage(machine=describe_machine(), history=history, job_cores=job, other_cores=others)
