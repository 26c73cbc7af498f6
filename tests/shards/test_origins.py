"""Where samples came from survives being written as runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SchemaError
from penstock.shards import OriginRuns, SplitOrigin, origins_from_json, origins_to_json


def expand(runs: list[list[int]] | None, num_samples: int) -> list[int]:
    """What a reader of the manifest makes of the runs."""
    if runs is None:
        return list(range(num_samples))
    ends = [run[0] for run in runs[1:]] + [num_samples]
    return [
        row + stride * step for (first, row, stride), end in zip(runs, ends, strict=True) for step in range(end - first)
    ]


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 9), max_size=60))
def test_runs_give_back_every_row(steps: list[int], cuts: list[int]) -> None:
    rows, runs, begin = np.cumsum(steps, dtype=np.int64), OriginRuns(), 0
    for count in [*cuts, len(rows)]:
        runs.add(rows[begin : begin + count])
        begin = min(len(rows), begin + count)
    assert runs.num_samples == len(rows)
    assert expand(runs.rows(), len(rows)) == rows.tolist()


def test_one_sample_per_row_needs_no_runs() -> None:
    runs = OriginRuns()
    runs.add(np.arange(0, 1000))
    runs.add(np.arange(1000, 1500))
    assert runs.rows() is None


def test_a_skipped_row_costs_one_run() -> None:
    runs = OriginRuns()
    runs.add(np.array([0, 1, 2, 4, 5, 6]))
    assert runs.rows() == [[0, 0, 1], [3, 4, 1]]


def test_too_many_runs_are_refused_with_a_way_out() -> None:
    runs = OriginRuns()
    runs.add(np.arange(0, 100_000, 2))
    with pytest.raises(SchemaError, match=r"50,000 runs .* origins='column'"):
        runs.rows()


def test_origins_survive_the_manifest_also_for_groups_of_files() -> None:
    origins = [
        SplitOrigin(("a",), False, 0, 10, 3, None),
        SplitOrigin(("a",), False, 10, 20, 2, [[0, 1, 1]]),
        SplitOrigin(("b", "c"), True, 0, 2, 2, None),
        SplitOrigin(("d",), False, 0, 1, 1, None),
    ]
    section = origins_to_json(origins)
    assert section["files"] == ["a", "b", "c", "d"]
    assert section["splits"][2] == [1, 0, 2, 2, None, 2]
    assert origins_from_json(section) == origins
