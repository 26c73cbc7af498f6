"""What preparing many things costs: as much more as there are more of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.preparation import prepare
from penstock.transforms import Tokenize


def count_calls(work: Callable[[], Any]) -> int:
    """Calls of Python functions, and steps of generators."""
    num_calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_four_times_as_many_files_are_four_times_the_work(tmp_path: Path, kind: str, inline: None) -> None:
    def calls(num_files: int) -> int:
        folder = tmp_path / str(num_files)
        folder.mkdir()
        for number in range(num_files):
            content = '{"text": "a"}\n' if kind == "jsonl" else "id,text\n1,a\n"
            (folder / f"{number:04}.{kind}").write_text(content)
        data = tmp_path / f"data{num_files}"
        return count_calls(lambda: prepare(folder, data, transform=Tokenize("bytes"), workers=1))

    calls(5)  # imports what preparing needs
    few, many, more = calls(20), calls(140), calls(500)
    assert more - few < 4.2 * (many - few)
