"""How many workers "auto" means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.machine import _limits, cpu_shortfall, default_workers, thread_settings, usable_cpus


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 processors without limits; the folder stands for /sys/fs/cgroup."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(_limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(_limits, "_OWN_CGROUPS", tmp_path / "own")
    for name in ("SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_limits_it_is_the_affinity(machine: Path) -> None:
    assert usable_cpus() == 16
    assert (default_workers("thread"), default_workers("process")) == (4, 8)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/job/step\n", {"job/cpu.max": "200000 100000\n", "job/step/cpu.max": "max 100000\n"}, 2),
        ("0::/job/step\n", {"job/cpu.max": "800000 100000\n", "job/step/cpu.max": "450000 100000\n"}, 4),
        ("4:cpu,cpuacct:/job\n0::/\n", {"cpu,cpuacct/job/cpu.cfs_quota_us": "500000\n",
                                       "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}, 5),
        ("4:cpu,cpuacct:/job\n", {"cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
                                 "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}, 16),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("nonsense", {}, 16),
    ],
)  # fmt: skip
def test_the_quota_of_the_control_groups(machine: Path, own: str, files: dict[str, str], expected: int) -> None:
    write(machine / "own", own)
    for name, text in files.items():
        write(machine / name, text)
    assert usable_cpus() == expected


def test_slurm_and_ranks_on_the_same_machine(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    assert usable_cpus() == 6
    assert default_workers("process") == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert usable_cpus() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert (usable_cpus(), default_workers("process"), default_workers("thread")) == (1, 1, 1)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "many")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert usable_cpus() == 16


def test_the_threads_of_a_worker_are_set_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    settings = thread_settings(2, ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"))
    assert settings == {"OMP_NUM_THREADS": "2", "RAYON_NUM_THREADS": "5"}


def test_processors_that_srun_did_not_pass_on_are_noticed(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert cpu_shortfall() is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    told = cpu_shortfall()
    assert told is not None
    assert told.startswith("Slurm gave this task 1 of the 8 processors")
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in told
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # torchrun, with each rank on a processor of its own
    assert cpu_shortfall() is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("SLURM_STEP_ID")  # the batch script itself
    assert cpu_shortfall() is None
