"""Where samples came from survives being written as runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SchemaError
from penstock.preparation._origins import SplitOrigin, Trace, origins_from_json, origins_to_json


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
    rows, trace, begin = np.cumsum(steps, dtype=np.int64), Trace(), 0
    for count in [*cuts, len(rows)]:
        trace.add(rows[begin : begin + count])
        begin = min(len(rows), begin + count)
    assert trace.num_samples == len(rows)
    assert expand(trace.rows(), len(rows)) == rows.tolist()


def test_one_sample_per_row_needs_no_runs() -> None:
    trace = Trace()
    trace.add(np.arange(0, 1000))
    trace.add(np.arange(1000, 1500))
    assert trace.rows() is None


def test_a_skipped_row_costs_one_run() -> None:
    trace = Trace()
    trace.add(np.array([0, 1, 2, 4, 5, 6]))
    assert trace.rows() == [[0, 0, 1], [3, 4, 1]]


def test_too_many_runs_are_refused_with_a_way_out() -> None:
    trace = Trace()
    trace.add(np.arange(0, 100_000, 2))
    with pytest.raises(SchemaError, match=r"50,000 runs .* origins='column'"):
        trace.rows()


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
