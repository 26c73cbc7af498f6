"""Advice: right for what this job may use, not for what the machine has."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.dataset import _stage
from penstock.errors import FormatError
from penstock.machine import job_memory, usable_cpus
from penstock.tuning import _advise


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    with penstock.DatasetWriter(tmp_path / "corpus", {"x": "int64[16]"}) as writer:
        writer.write_batch({"x": np.arange(16_000).reshape(1000, 16)})
    return tmp_path / "corpus"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Storage and memory as told."""
    for variable in _stage._SCRATCH_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def words(advice: _advise.Advice) -> str:
    return "\n".join(advice.sentences())


def test_data_that_fits_is_mapped_and_shuffled_in_full(corpus, on):
    on.setattr(_advise, "job_memory", lambda: 64_000_000_000)
    on.setattr(_advise, "storage_kind", lambda path: "ssd")
    advice = penstock.advise(corpus)
    assert (advice.fits, advice.placement, advice.shuffle) == (True, "memory map", "full")
    assert "fits in the" in words(advice)
    assert "Later ones find it in memory." in words(advice)
    assert "in about 1 page fault." in words(dataclasses.replace(advice, data_bytes=1000))
    assert str(advice).splitlines()[0] == f"{corpus}: 1,000 samples"


def test_the_model_and_workers_are_left_out_of_the_memory(corpus, on):
    on.setattr(_advise, "job_memory", lambda: 10_000_000_000)
    assert penstock.advise(corpus, reserve_bytes=1e9).fits
    assert not penstock.advise(corpus, reserve_bytes=10e9).fits
    workers_alone = penstock.advise(corpus, reserve_bytes=0).reserved_bytes
    assert penstock.advise(corpus).reserved_bytes - workers_alone == 2_000_000_000
    for nonsense in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected 0 or more"):
            penstock.advise(corpus, reserve_bytes=nonsense)


@pytest.mark.parametrize("variables", [{"LOCAL_WORLD_SIZE": "4"}, {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}])
def test_ranks_of_one_node_share_the_data_and_not_what_they_need_for_themselves(corpus, on, variables):
    on.setattr(_advise, "job_memory", lambda: 9_000_000_000)
    assert penstock.advise(corpus, reserve_bytes=2.5e9).fits
    for name, value in variables.items():
        on.setenv(name, value)
    advice = penstock.advise(corpus, reserve_bytes=2.5e9)
    assert (advice.num_ranks, advice.fits) == (4, False)
    assert "for training and workers of 4 ranks" in next(advice.sentences())


@pytest.mark.parametrize(("storage", "shuffle"), [("rotating", "windows"), ("network", "windows"), ("memory", "full")])
def test_large_data_is_shuffled_as_its_storage_allows(corpus, on, storage, shuffle):
    on.setattr(_advise, "job_memory", lambda: 1_000_000_000)
    on.setattr(_advise, "storage_kind", lambda path: storage)
    on.setattr(_advise, "_TYPICAL", _advise._TYPICAL | {"memory": (1e6, 1e-6)})
    advice = penstock.advise(corpus, reserve_bytes=2e9)
    assert (advice.fits, advice.shuffle) == (False, shuffle)
    assert f"shuffle(mode='{shuffle}')" in words(advice)


def test_data_on_a_network_is_to_be_staged_where_there_is_room(corpus, on, tmp_path):
    on.setattr(_advise, "job_memory", lambda: 1_000_000_000)
    on.setattr(_advise, "storage_kind", lambda path: "network")
    assert penstock.advise(corpus, reserve_bytes=2e9).placement == "stream"
    on.setenv("JOBSCRATCH", str(tmp_path))
    advice = penstock.advise(corpus, reserve_bytes=2e9)
    assert advice.placement == "stage"
    assert f"penstock stage {corpus} $JOBSCRATCH" in words(advice)
    on.setattr(_stage, "is_network_filesystem", lambda path: True)
    assert penstock.advise(corpus, reserve_bytes=2e9).placement == "stream"


def slow(row, rng):
    import time

    time.sleep(0.005)
    return row


def test_measuring_reads_a_little_and_times_mapped_functions(corpus):
    advice = penstock.advise(penstock.open(corpus).shuffle(seed=1).map(slow).batch(4), measure=True)
    assert advice.speed.is_measured
    assert advice.map_seconds > 0.01
    assert "needs no random numbers once" in words(advice)
    plain = penstock.advise(penstock.open(corpus).batch(4), measure=True)
    assert "Mapped functions" not in words(plain)


def test_measuring_reads_files_of_the_dataset_only(corpus, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for number, target in enumerate(("/nowhere", "/dev/zero", tmp_path / "pipe", sys.executable)):
        (corpus / f"{number}.safetensors").symlink_to(target)
    assert penstock.advise(corpus, measure=True).speed.is_measured
    shard = next(corpus.glob("shard-*"))
    shard.unlink()
    shard.symlink_to(sys.executable)
    with pytest.raises(FormatError, match="is a symbolic link"):
        penstock.advise(corpus, measure=True)


def test_nothing_can_be_measured_of_a_dataset_without_samples(tmp_path):
    penstock.DatasetWriter(tmp_path / "empty", {"x": "int64"}).close()
    assert not penstock.advise(tmp_path / "empty", measure=True).speed.is_measured


def test_arrays_in_memory_and_mixtures_have_advice_too(corpus):
    arrays = penstock.advise(penstock.from_arrays({"x": np.arange(9)}))
    assert (arrays.storage, arrays.placement) == ("memory", "RAM")
    assert "already in memory" in words(arrays)
    data = penstock.open(corpus)
    mixed = penstock.mix(
        {"a": (data, 1.0), "b": (penstock.from_arrays({"x": np.ones((9, 16), int)}), 1.0)}, seed=1, rows=64
    )
    assert penstock.advise(mixed.batch(2)).data_bytes == data.storage.num_bytes


def test_the_command_prints_sentences_or_json(corpus, tmp_path, capsys):
    assert main(["advise", str(corpus)]) == 0
    assert "1,000 samples" in capsys.readouterr().out
    (tmp_path / "plan.toml").write_text(penstock.open(corpus).batch(4).to_toml())
    assert main(["advise", str(tmp_path / "plan.toml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_samples"] == 1000
    assert found["sentences"]


BUDGET = """
from penstock.machine import job_memory, usable_cpus
print(usable_cpus(), job_memory())
"""


def budget(command: list[str], **environment: str) -> tuple[int, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LOCAL_WORLD"))}
    done = subprocess.run(
        [*command, sys.executable, "-c", BUDGET], env=clean | environment, capture_output=True, text=True, check=True
    )
    cpus, memory = done.stdout.split()
    return int(cpus), int(memory)


def test_the_budget_under_taskset_and_slurm():
    cpu = min(os.sched_getaffinity(0))
    assert budget(["taskset", "-c", str(cpu)])[0] == 1
    assert budget([], SLURM_MEM_PER_NODE="1000")[1] == 1000 << 20
    assert budget([], SLURM_MEM_PER_CPU="500", SLURM_CPUS_ON_NODE="3")[1] == 1500 << 20


def test_slurm_without_cpus_per_task_shares_the_node_between_its_tasks(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(40)))
    monkeypatch.setattr("penstock.machine._limits.cpu_quota", lambda: None)
    for name in ("SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "40")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    assert usable_cpus() == 10
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert usable_cpus() == 8
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "odd")
    assert usable_cpus() == 40


@pytest.fixture
def real_group() -> Iterator[tuple[Path, Path]]:
    """Control groups of this kernel with limits: half a processor, and 1 GB; skipped where they cannot be made."""
    made: list[Path] = []
    folders = []
    root = Path("/sys/fs/cgroup")
    v2 = (root / "cgroup.controllers").exists()
    limits = {"cpu": ("cpu.max", "50000 100000") if v2 else ("cpu.cfs_quota_us", "50000"),
              "memory": ("memory.max", str(1 << 30)) if v2 else ("memory.limit_in_bytes", str(1 << 30))}  # fmt: skip
    try:
        for controller, (name, value) in limits.items():
            folder = (root if v2 else root / controller) / f"penstock-test-{os.getpid()}"
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
            (folder / name).write_text(value)
            folders.append(folder)
    except OSError as error:
        for folder in made:
            folder.rmdir()
        pytest.skip(f"this kernel lets nobody make a control group here: {error}")
    yield folders[0], folders[1]
    for folder in made:
        folder.rmdir()


def test_the_budget_in_a_real_control_group(real_group):
    groups = sorted(set(real_group))
    enter = " && ".join(f"echo $$ > {folder}/cgroup.procs" for folder in groups)
    cpus, memory = budget(["bash", "-c", f'{enter} && exec "$@"', "bash"])
    assert (cpus, memory) == (1, 1 << 30)
    assert job_memory() != memory


def test_a_slurm_task_without_the_processors_of_its_job_is_told(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert penstock.advise(corpus).cpu_shortfall is None
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4096")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert "export SRUN_CPUS_PER_TASK" in str(penstock.advise(corpus))
    with pytest.warns(UserWarning, match=r"Slurm gave this task \d+ of the 4096 processors"):
        penstock.DataLoader(penstock.open(corpus).batch(2))
