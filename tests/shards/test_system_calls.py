"""A writer that is hit at any of its system calls: killed, refused, or with half of a write done.

What `test_crashes.py` does with Python's `os` is done here below Python.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from filesystem.system_calls import FAULTS, Fault, Victims, victims_in
from penstock.shards import DatasetWriter

from .folders import COLUMNS, assert_tidy, contents, copy_folder, files_of, make_samples, write
from .strategies import scratch

OLD, NEW = make_samples(1, 8), make_samples(3, 5)
MODES = ["create", "append", "overwrite"]
CHANGE = f"{__name__}:change"


def change(path: str, mode: str) -> None:
    """What a victim does."""
    write(Path(path), NEW, mode)


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """Folders `old`, and for each mode what an undisturbed writer makes of it; `none` is not there."""
    with scratch() as folder:
        write(folder / "old", OLD)
        for mode in MODES:
            change(str(fresh(folder, mode, folder / mode)), mode)
        yield folder


@pytest.fixture(scope="module")
def victims(room: Path) -> Iterator[Victims]:
    with victims_in(room) as victims:
        victims.warm_up(CHANGE, str(room / "warm"), "create")
        yield victims


def fresh(room: Path, mode: str, path: Path) -> Path:
    return copy_folder(room / ("none" if mode == "create" else "old"), path)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("step", [25, pytest.param(1, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])])
def test_a_writer_hit_at_any_system_call_leaves_the_old_dataset_or_the_new_one(
    room: Path, victims: Victims, mode: str, fault: Fault, step: int
) -> None:
    path = fresh(room, mode, room / "disk" / "data")
    before, after = contents(path), contents(room / mode)
    assert victims.run(CHANGE, str(path), mode).is_done
    names = [call.name for call in victims.faults.calls]
    assert {"open", "write", "pwrite", "ftruncate", "fsync", "close", "rename", "unlink", "mkdir", "flock"} <= {*names}
    for k in range(1 + len(fault.action) % step, len(names) + 1, step):
        path = fresh(room, mode, path)
        outcome = victims.strike(fault, k, CHANGE, str(path), mode)
        assert victims.faults.has_hit
        assert outcome.is_killed == fault.kills, outcome
        assert outcome.error in ("", "StorageError"), outcome
        assert outcome.is_done or fault.action != "shorten", outcome
        found = contents(path)
        assert found in (before, after)
        if outcome.is_done or "the new dataset is in place" in outcome.message:
            assert found == after
        elif outcome.error:
            assert found == before
        if found == before:
            change(str(path), mode)
        else:
            DatasetWriter(path, COLUMNS, mode="append").abort()
        assert_tidy(path)
        assert files_of(path) == files_of(room / mode)
