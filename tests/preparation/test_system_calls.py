"""`prepare` hit at any of its system calls: in the parent, in a worker, in a thread that writes past the page cache.

After each fault the dataset is the old one or the new one, and a rerun gives the bytes of an undisturbed run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from filesystem.system_calls import FAULTS, NO_FAULT, Call, Fault, Outcome, Victims, victims_in
from penstock.preparation import prepare
from penstock.transforms import Tokenize

from .corpora import assert_holds, contents, make_corpus

PREPARE = f"{__name__}:prepare_again"
# What may be raised: a disk that fails, or a task that was given up after three workers died of it.
ERRORS = ("StorageError", "WorkerDied")


def prepare_again(source: str, destination: str, settings: dict[str, Any]) -> None:
    """What a victim does."""
    settings = {"transform": Tokenize("bytes"), "shard_bytes": 20_000, "overwrite": True, **settings}
    prepare(f"{source}/*.jsonl", destination, **settings)


class Room:
    """Raw data, a dataset made of a part of it, and what an undisturbed run makes of both."""

    def __init__(self, folder: Path, victims: Victims) -> None:
        self.folder, self.victims = folder, victims
        self.texts = make_corpus(folder / "raw", num_files=3, num_rows=40)
        first = {"transform": Tokenize("bytes"), "workers": 1, "shard_bytes": 10_000}
        prepare(f"{folder}/raw/*-000.jsonl", folder / "old", **first)

    def fresh(self) -> Path:
        destination = self.folder / "disk" / "data"
        shutil.rmtree(destination, ignore_errors=True)
        return Path(shutil.copytree(self.folder / "old", destination))

    def run(self, destination: Path, settings: dict[str, Any], fault: Fault = NO_FAULT, at: int = 0) -> Outcome:
        return self.victims.strike(fault, at, PREPARE, str(self.folder / "raw"), str(destination), settings)

    def run_undisturbed(self, settings: dict[str, Any]) -> tuple[dict[str, str], list[Call]]:
        """The dataset, and all calls."""
        destination = self.fresh()
        assert self.run(destination, settings).is_done
        return contents(destination), self.victims.faults.calls

    def strike(self, settings: dict[str, Any], reference: dict[str, str], fault: str, at: int) -> bool:
        """Prepare with a fault at call number `at`, check what is left, prepare again; whether the fault came to be."""
        destination = self.fresh()
        before = contents(destination)
        outcome = self.run(destination, settings, FAULTS[fault], at)
        has_hit = self.victims.faults.has_hit
        told = f"{fault} at {at}: {outcome}"
        assert outcome.error in ("", *ERRORS), told
        assert penstock.verify(destination).is_sound, told
        found = contents(destination)
        is_new = found["manifest.json"] == reference["manifest.json"]
        assert found.items() >= (reference if is_new else before).items(), told
        assert outcome.is_killed or is_new == (outcome.is_done or "the new dataset is in place" in outcome.message), (
            told
        )
        again = self.run(destination, settings)
        assert again.is_done, f"{told}, then {again}"
        assert contents(destination) == reference, told
        assert_holds(destination, self.texts)
        return has_hit


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("room")
    with victims_in(folder) as victims:
        yield Room(folder, victims)


@pytest.mark.stress
def test_faults_in_a_worker_that_writes_past_the_page_cache_change_no_byte(room: Room) -> None:
    settings = {"workers": 1}
    reference, calls = room.run_undisturbed(settings)
    names = {call.name for call in calls}
    assert {"open", "write", "fsync", "close", "rename", "link", "unlink", "mkdir", "flock"} <= names
    direct = [k for k, call in enumerate(calls, start=1) if call.name == "write" and call.is_direct]
    assert calls[direct[0] - 1].pid != calls[0].pid  # the parent made the first call, which opens the lock
    for fault in ("killed halfway", "ENOSPC once"):
        assert room.strike(settings, reference, fault, direct[1])
    destination = room.fresh()
    assert room.run(destination, settings, FAULTS["short writes from then on"], 1).is_done
    assert contents(destination) == reference


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("settings", "step"),
    [({"workers": 2}, 7), ({"workers": 2, "shuffle": 3}, 23)],
    ids=["in order", "shuffled"],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_prepare_hit_at_any_system_call_leaves_the_old_dataset_or_the_new_one(
    room: Room, settings: dict[str, Any], step: int, fault: str
) -> None:
    reference, calls = room.run_undisturbed(settings)
    hits = [room.strike(settings, reference, fault, at) for at in range(1 + len(fault) % step, len(calls) + 1, step)]
    assert sum(hits) >= len(hits) - 2  # with two workers the number of calls differs a little from run to run
