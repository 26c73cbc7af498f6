"""Findings on recordings of real runs of the gallery, kept by `benchmarks/bench_doctor.py --keep`: nothing runs.

They were made on two cores that other programs used, too, so that their intervals are wide.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from .test_findings import find
from .test_gallery import HEALTHY, ILL

EXCERPTS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "_excerpts.py"))
make_excerpt, read_excerpt = EXCERPTS["make_excerpt"], EXCERPTS["read_excerpt"]
RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json"))


def test_there_is_a_recording_of_each_script_of_the_gallery() -> None:
    assert {path.stem for path in RECORDINGS} == {*ILL, *HEALTHY}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_illness_of_a_recorded_run_is_named_first(path: Path) -> None:
    found = find(read_excerpt(path.read_text()))
    assert [each.id for each in found][:1] == ([] if path.stem in HEALTHY else [ILL[path.stem]])
    assert all(each.gain is None or each.gain.ratio > each.gain.error for each in found)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_an_excerpt_of_an_excerpt_is_the_same_and_small(path: Path) -> None:
    text = path.read_text()
    assert make_excerpt(read_excerpt(text)) == text
    assert len(text) < 80_000
