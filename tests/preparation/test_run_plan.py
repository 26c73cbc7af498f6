"""What a run will do is decided by one pure function, and can be printed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import Tokenize, prepare
from penstock.errors import DatasetExists, SchemaError
from penstock.preparation import Progress
from penstock.preparation._plan import RunPlan, plan_run
from penstock.preparation._settings import Settings
from penstock.preparation._survey import Group, Request, SourcePreview, Survey, survey
from penstock.preparation._work_folder import WorkFolder
from penstock.shards import read_manifest
from penstock.sources import SourceOptions

from .corpora import contents, write_jsonl

DEFAULTS: dict[str, Any] = {
    "workers": 1,
    "engine": "local",
    "address": None,
    "shard_bytes": 20_000,
    "shuffle": None,
    "pack": (),
    "on_error": "raise",
    "max_skipped": None,
    "overwrite": False,
    "remove": False,
    "append": False,
    "limit": None,
    "origins": "auto",
}


def look(raw: Path, data: Path, **settings: Any) -> Survey:
    request = Request(
        destination=data,
        sources=raw,
        transform=Tokenize("bytes"),
        reading=SourceOptions(),
        settings=Settings(**{**DEFAULTS, **settings}),
        run_name="run",
    )
    manifest = read_manifest(data) if (data / "manifest.json").exists() else None

    def ignore(groups: Sequence[Group]) -> None:
        assert groups

    return survey(request, SourcePreview(request), manifest, WorkFolder(data), ignore)


def run(raw: Path, data: Path, **more: Any) -> None:
    prepare(raw, data, transform=Tokenize("bytes"), workers=1, shard_bytes=20_000, **more)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    for number in range(2):
        write_jsonl(tmp_path / "raw" / f"{number}.jsonl", 30, number)
    return tmp_path / "raw"


def paths(plan: RunPlan) -> list[str]:
    return [Path(split.path).name for task in plan.tasks for split in task.splits]


def test_the_same_facts_give_the_same_plan(raw: Path, tmp_path: Path) -> None:
    found = look(raw, tmp_path / "data")
    assert plan_run(found) == plan_run(found)
    assert not (tmp_path / "data").exists()


def test_a_new_dataset_reads_every_file(raw: Path, tmp_path: Path) -> None:
    plan = plan_run(look(raw, tmp_path / "data"))
    assert sorted(set(paths(plan))) == ["0.jsonl", "1.jsonl"]
    assert plan.left == plan.tasks
    assert (plan.kept, plan.removed, plan.finished) == ((), (), {})
    assert " to do, about " in plan.summary()


def test_a_dataset_that_is_up_to_date_has_nothing_to_do(raw: Path, tmp_path: Path) -> None:
    run(raw, tmp_path / "data")
    plan = plan_run(look(raw, tmp_path / "data"))
    assert plan.is_up_to_date
    assert (plan.tasks, plan.removed) == ((), ())
    assert plan.summary() == f"{tmp_path / 'data'}: up to date, {plan.num_kept} task{'s' * (plan.num_kept > 1)} kept."


def test_an_added_file_is_read_and_nothing_removed(raw: Path, tmp_path: Path) -> None:
    run(raw, tmp_path / "data")
    write_jsonl(raw / "2.jsonl", 30, 2)
    plan = plan_run(look(raw, tmp_path / "data"))
    assert set(paths(plan)) == {"2.jsonl"}
    assert plan.removed == ()
    assert plan.first_shard == len(read_manifest(tmp_path / "data").shards)


def test_the_plan_names_the_shards_that_the_commit_removes(raw: Path, tmp_path: Path) -> None:
    run(raw, tmp_path / "data")
    before = contents(tmp_path / "data")
    write_jsonl(raw / "1.jsonl", 31, 7)
    plan = plan_run(look(raw, tmp_path / "data"))
    assert plan.removed
    assert f"{len(plan.removed)} shard" in plan.summary()
    run(raw, tmp_path / "data")
    after = contents(tmp_path / "data")
    gone = {name for name in before.keys() - after.keys() if name.startswith("shard-")}
    assert gone == set(plan.removed)


def test_tasks_that_an_interrupted_run_finished_are_not_done_again(raw: Path, tmp_path: Path) -> None:
    write_jsonl(raw / "2.jsonl", 20_000, 2)  # for longer than the run needs to hear of the interrupt

    def interrupt(progress: Progress) -> None:
        if progress.tasks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(raw, tmp_path / "data", on_progress=interrupt)
    plan = plan_run(look(raw, tmp_path / "data"))
    assert 0 < len(plan.finished) < len(plan.tasks)
    assert len(plan.left) == len(plan.tasks) - len(plan.finished)
    assert plan.num_kept == len(plan.finished)


def test_other_settings_are_refused_before_anything_is_decided(raw: Path, tmp_path: Path) -> None:
    run(raw, tmp_path / "data")
    with pytest.raises(DatasetExists, match=r"made with a different shard_bytes \(was 20000, is now 30000\)"):
        look(raw, tmp_path / "data", shard_bytes=30_000)


def test_packing_needs_documents_of_tokens(raw: Path, tmp_path: Path) -> None:
    found = look(raw, tmp_path / "data", pack=(8,))
    assert found.first_rows is not None
    rows = dataclasses.replace(found.first_rows, columns={"n": "int64"})
    with pytest.raises(SchemaError, match="ragged column 'tokens'"):
        plan_run(dataclasses.replace(found, first_rows=rows))


def test_a_run_logs_its_plan(raw: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="penstock.preparation"):
        run(raw, tmp_path / "data")
        run(raw, tmp_path / "data")
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert " to do, about " in logged[0]
    assert "up to date" in logged[1]
