"""Whether notes of where samples came from can be followed, whoever wrote them.

`{"files": [path, ...], "splits": [[file, begin, end, samples, rows], ...]}`, as `docs/format.md` describes them.
"""

from __future__ import annotations

from typing import Any

_MAX_COUNT = 1 << 48


def are_sound(origins: Any) -> bool:
    """Whether every split leads to files that are listed, and its runs to rows of them."""
    files, splits = (origins.get(key) if isinstance(origins, dict) else None for key in ("files", "splits"))
    if not isinstance(files, list) or not isinstance(splits, list):
        return False
    return all(_is_split(split, len(files)) for split in splits)


def _is_split(split: Any, num_files: int) -> bool:
    if not isinstance(split, list) or len(split) not in (5, 6):
        return False
    file, _, _, num_samples, runs, *group = split
    if not all(_is_count(number) for number in (file, num_samples, *group)):
        return False
    num_rows = group[0] if group else _MAX_COUNT
    # Without runs, either sample k is row k, or a column of the dataset says which row it is.
    are_runs_sound = runs is None or _are_runs(runs, num_samples, num_rows)
    return are_runs_sound and file + (group[0] if group else 1) <= num_files


def _are_runs(runs: Any, num_samples: int, num_rows: int) -> bool:
    """Whether runs `[first sample, first row, stride]` begin with sample 0 and stay below `num_rows`."""
    if not isinstance(runs, list) or not all(_is_run(run) for run in runs):
        return False
    firsts = [*(run[0] for run in runs), num_samples]
    pairs = zip(runs, firsts[1:], strict=True)
    last_rows = [row + max(0, end - 1 - first) * stride for (first, row, stride), end in pairs]
    return firsts[0] == 0 and firsts == sorted(firsts) and max(last_rows, default=num_rows) < num_rows


def _is_run(run: Any) -> bool:
    return isinstance(run, list) and len(run) == 3 and all(_is_count(number) for number in run)


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < _MAX_COUNT
