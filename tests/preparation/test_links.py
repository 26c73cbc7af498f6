"""`prepare` works on a folder that a stranger may have packed: nothing outside is written, emptied or taken in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import Tokenize, prepare
from penstock.cli import main
from penstock.errors import FormatError
from penstock.filesystem import OpenFolder
from penstock.preparation import Progress

from .corpora import assert_holds, contents, make_corpus

FOLDERS = ("", "attempts", "records", "ready", "dealt")


def run(raw: Path, data: Path, **more: Any) -> None:
    prepare(raw, data, transform=Tokenize("bytes"), workers=1, shard_bytes=20_000, **more)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "raw", 3, 100)
    return tmp_path / "raw"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of somebody's files, with names that a clean-up might look for."""
    folder = tmp_path / "precious"
    (folder / "letters").mkdir(parents=True)
    for name in ("thesis.tex", "letters/mother.txt", "manifest.json", "recipe.json", "tasks.json"):
        (folder / name).write_text("irreplaceable")
    return folder


def stop_after_a_task(raw: Path, data: Path, **more: Any) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.tasks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(raw, data, on_progress=interrupt, **more)


@pytest.mark.parametrize("shuffle", [None, pytest.param(1, marks=pytest.mark.stress)])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_place_of_a_folder_of_the_run_is_refused_and_its_target_is_untouched(
    raw: Path, tmp_path: Path, precious: Path, name: str, shuffle: int | None
) -> None:
    stop_after_a_task(raw, tmp_path / "data", shuffle=shuffle)
    place = tmp_path / "data" / ".preparing" / name
    place.rename(tmp_path / "held")
    place.symlink_to(precious, target_is_directory=True)
    before = contents(precious)
    command = ["prepare", str(raw), str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "1"]
    command += ["--shard-bytes", "20000", *(["--shuffle", str(shuffle)] if shuffle is not None else [])]
    assert main(command) == 1
    assert contents(precious) == before
    with pytest.raises(
        FormatError, match=r"\.preparing.* is a link, or not a folder\. Penstock does not follow links here"
    ):
        run(raw, tmp_path / "data", shuffle=shuffle, overwrite=True)
    assert contents(precious) == before
    assert place.is_symlink()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_of_another_recipe_is_not_followed_either(raw: Path, tmp_path: Path, precious: Path, name: str) -> None:
    """Without a recipe that fits, everything in `.preparing` is removed."""
    place = tmp_path / "data" / ".preparing" / name
    place.parent.mkdir(parents=True)
    place.symlink_to(precious, target_is_directory=True)
    before = contents(precious)
    with pytest.raises(FormatError, match=r"\.preparing"):
        run(raw, tmp_path / "data")
    assert contents(precious) == before


def plant_in_attempts(work: Path, precious: Path) -> None:
    (work / "attempts" / "a").symlink_to(precious, target_is_directory=True)
    (work / "attempts" / "recipe.json").symlink_to(precious / "recipe.json")
    (work / "attempts" / "tasks.json").symlink_to(precious / "tasks.json")


def plant_on_the_shelves(work: Path, precious: Path) -> None:
    for shelf in ("ready", "dealt", "records"):
        (work / shelf / "folder").symlink_to(precious, target_is_directory=True)
        (work / shelf / "manifest.json").symlink_to(precious / "manifest.json")


def plant_files(work: Path, precious: Path) -> None:
    for name in ("tasks.json", "run.json"):
        (work / name).unlink(missing_ok=True)
        (work / name).symlink_to(precious / "tasks.json")
    (work.parent / "run.json").symlink_to(precious / "thesis.tex")


@pytest.mark.parametrize("shuffle", [None, pytest.param(1, marks=pytest.mark.stress)])
@pytest.mark.parametrize("plant", [plant_in_attempts, plant_on_the_shelves, plant_files])
def test_links_among_the_files_of_a_run_are_removed_and_their_targets_are_untouched(
    raw: Path, tmp_path: Path, precious: Path, plant: Callable[[Path, Path], None], shuffle: int | None
) -> None:
    stop_after_a_task(raw, tmp_path / "data", shuffle=shuffle)
    before = contents(precious)
    plant(tmp_path / "data" / ".preparing", precious)
    run(raw, tmp_path / "data", shuffle=shuffle)
    assert contents(precious) == before
    assert_holds(tmp_path / "data", make_corpus(raw, 3, 100))


def test_a_shard_that_is_a_link_is_made_again(raw: Path, tmp_path: Path) -> None:
    stop_after_a_task(raw, tmp_path / "data")
    for shard in (tmp_path / "data" / ".preparing" / "ready").iterdir():
        shard.rename(tmp_path / shard.name)
        shard.symlink_to(tmp_path / shard.name)
    run(raw, tmp_path / "data")
    assert not any(path.is_symlink() for path in (tmp_path / "data").iterdir())
    assert_holds(tmp_path / "data", make_corpus(raw, 3, 100))


def test_a_folder_that_is_swapped_for_a_link_during_a_run_stays_the_one_that_was_opened(
    tmp_path: Path, precious: Path
) -> None:
    (tmp_path / "data" / "work").mkdir(parents=True)
    before = contents(precious)
    with OpenFolder(tmp_path / "data", "work") as folder:
        (tmp_path / "data" / "work").rename(tmp_path / "moved")
        (tmp_path / "data" / "work").symlink_to(precious, target_is_directory=True)
        folder.create("file", [b"x"])
        folder.remove("thesis.tex")
        assert folder.names() == ["file"]
    assert contents(precious) == before
    assert os.listdir(tmp_path / "moved") == ["file"]


def test_the_path_that_a_user_gives_may_lead_through_links(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk", target_is_directory=True)
    run(raw, tmp_path / "link" / "data")
    assert_holds(tmp_path / "disk" / "data", make_corpus(raw, 3, 100))
