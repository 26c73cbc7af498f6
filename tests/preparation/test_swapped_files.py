"""What takes the place of a file in `.preparing`, before or during a run, gets into no dataset and holds up no run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Tokenize, prepare
from penstock.errors import PenstockError
from penstock.preparation import Progress

from .corpora import assert_holds, contents, make_corpus


def run(raw: Path, data: Path, **more: Any) -> None:
    prepare(raw, data, transform=Tokenize("bytes"), workers=1, shard_bytes=20_000, **more)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "raw", 3, 100)
    return tmp_path / "raw"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("irreplaceable")
    return tmp_path / "precious"


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Opening a FIFO waits for a writer, who never comes."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def by_fifo(path: Path, precious: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def by_link(path: Path, precious: Path) -> None:
    path.unlink()
    path.symlink_to(precious / "thesis.tex")


def by_folder(path: Path, precious: Path) -> None:
    path.unlink()
    path.mkdir()


def by_hard_link(path: Path, precious: Path) -> None:
    path.unlink()
    os.link(precious / "thesis.tex", path)


Swap = Callable[[Path, Path], None]
SWAPS = [by_fifo, by_link, by_folder, by_hard_link]


def interrupt(progress: Progress) -> None:
    if progress.tasks:
        raise KeyboardInterrupt


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("name", ["recipe.json", "tasks.json", "records/*.json", "ready/shard-*"])
def test_what_was_swapped_before_a_run_is_made_again(
    raw: Path, tmp_path: Path, precious: Path, name: str, swap: Swap
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(raw, tmp_path / "data", on_progress=interrupt)
    before = contents(precious)
    for path in list((tmp_path / "data" / ".preparing").glob(name)):
        swap(path, precious)
    run(raw, tmp_path / "data")
    assert contents(precious) == before
    assert_holds(tmp_path / "data", make_corpus(raw, 3, 100))


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("shuffle", [None, 1])
@pytest.mark.parametrize("name", ["records/*.json", "ready/shard-*", "dealt/shard-*"])
def test_what_is_swapped_during_a_run_gets_into_no_dataset(
    raw: Path, tmp_path: Path, precious: Path, name: str, shuffle: int | None, swap: Swap
) -> None:
    before, num_samples = contents(precious), len(make_corpus(raw, 3, 100))

    def swap_all(progress: Progress) -> None:
        if progress.tasks == progress.total_tasks:
            for path in list((tmp_path / "data" / ".preparing").glob(name)):
                if path.is_file() and not path.is_symlink():
                    swap(path, precious)

    try:
        run(raw, tmp_path / "data", shuffle=shuffle, on_progress=swap_all)
    except (PenstockError, OSError):
        assert not (tmp_path / "data" / "manifest.json").exists()
    else:
        assert len(penstock.open(tmp_path / "data")) == num_samples
        assert penstock.verify(tmp_path / "data").is_sound
    assert contents(precious) == before
    run(raw, tmp_path / "data", shuffle=shuffle)
    assert penstock.verify(tmp_path / "data").is_sound
    assert contents(precious) == before
