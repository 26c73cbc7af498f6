"""What a run will do is decided before it does anything, and logged in one sentence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock import KeepColumns, Tokenize, prepare
from penstock.errors import DatasetExists, SchemaError
from penstock.preparation import Prepared, Progress, find_unfinished
from penstock.shards import read_manifest

from .corpora import contents, write_jsonl


class Runs:
    """Runs of one preparation, and the plans that they logged."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.raw, self.data = folder / "raw", folder / "data"
        self._log = caplog

    def run(self, **more: Any) -> Prepared:
        self._log.clear()
        with self._log.at_level(logging.INFO, logger="penstock.preparation"):
            return prepare(self.raw, self.data, transform=Tokenize("bytes"), workers=1, shard_bytes=20_000, **more)

    @property
    def plan(self) -> str:
        """What the last run planned."""
        (logged,) = [record.getMessage() for record in self._log.records if record.levelno == logging.INFO]
        return logged.removeprefix(f"{self.data}: ")


@pytest.fixture
def runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Runs:
    (tmp_path / "raw").mkdir()
    for number in range(2):
        write_jsonl(tmp_path / "raw" / f"{number}.jsonl", 30, number)
    return Runs(tmp_path, caplog)


def size(path: Path) -> int:
    return path.stat().st_size


def test_a_new_dataset_reads_every_file(runs: Runs) -> None:
    made = runs.run()
    num_bytes = sum(map(size, runs.raw.iterdir()))
    assert runs.plan == f"{made.tasks_run} task{'s' * (made.tasks_run > 1)} to do, about {num_bytes:,} bytes."
    assert (made.raw_bytes, made.tasks_kept) == (num_bytes, 0)


def test_a_dataset_that_is_up_to_date_has_nothing_to_do(runs: Runs) -> None:
    made = runs.run()
    again = runs.run()
    assert (again.tasks_run, again.tasks_kept) == (0, made.tasks_run)
    assert runs.plan == f"up to date, {made.tasks_run} task{'s' * (made.tasks_run > 1)} kept."


def test_an_added_file_is_read_and_nothing_removed(runs: Runs) -> None:
    before = runs.run().num_shards
    write_jsonl(runs.raw / "2.jsonl", 30, 2)
    assert runs.run().raw_bytes == size(runs.raw / "2.jsonl")
    assert "to be removed" not in runs.plan
    numbers = [int(shard.name.split("-")[1]) for shard in read_manifest(runs.data).shards]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > before


def test_the_plan_counts_the_shards_that_the_commit_removes(runs: Runs) -> None:
    runs.run()
    before = contents(runs.data)
    write_jsonl(runs.raw / "1.jsonl", 31, 7)
    runs.run()
    gone = {name for name in before.keys() - contents(runs.data).keys() if name.startswith("shard-")}
    assert gone
    assert f"{len(gone)} shard{'s' * (len(gone) > 1)} to be removed" in runs.plan


def test_tasks_that_an_interrupted_run_finished_are_not_done_again(runs: Runs) -> None:
    write_jsonl(runs.raw / "2.jsonl", 20_000, 2)  # for longer than the run needs to hear of the interrupt

    def interrupt(progress: Progress) -> None:
        if progress.tasks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(on_progress=interrupt)
    finished = find_unfinished(runs.data)
    assert finished is not None
    assert 0 < finished.tasks < finished.total_tasks
    made = runs.run()
    assert (made.tasks_kept, made.tasks_run) == (finished.tasks, finished.total_tasks - finished.tasks)
    assert runs.plan.startswith(f"{made.tasks_run} task{'s' * (made.tasks_run > 1)} to do")
    assert f"{finished.tasks} task{'s' * (finished.tasks > 1)} kept" in runs.plan


def test_other_settings_are_refused_before_anything_is_done(runs: Runs) -> None:
    runs.run()
    before = contents(runs.data)
    with pytest.raises(DatasetExists, match=r"made with a different shard_bytes \(was 20000, is now 30000\)"):
        prepare(runs.raw, runs.data, transform=Tokenize("bytes"), workers=1, shard_bytes=30_000)
    assert contents(runs.data) == before


def test_packing_needs_documents_of_tokens(runs: Runs) -> None:
    with pytest.raises(SchemaError, match="ragged column 'tokens'"):
        prepare(runs.raw, runs.data, transform=KeepColumns(), workers=1, pack=8)
    assert not runs.data.exists()
