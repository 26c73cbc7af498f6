"""Small data to plan over, and slow, obvious references to compare with.

Every token is another number, so "exactly once" is a matter of counting.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import penstock
from penstock.plan import Dataset, DocumentTrace, Plan

IGNORED = -100
Documents = list[np.ndarray]


def make_documents(lengths: Sequence[int], *, first: int = 1, dtype: str = "uint32") -> Documents:
    """Documents of these lengths; tokens count on from `first`."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(first + a, first + b, dtype=dtype) for a, b in pairwise(ends.tolist())]


def ragged(documents: Sequence[np.ndarray], dtype: str = "uint32") -> penstock.Ragged:
    """Documents as a column."""
    values = np.concatenate([*documents, np.empty(0, dtype)]).astype(dtype)
    return penstock.Ragged(values, np.cumsum([0, *map(len, documents)]).astype(np.int64))


def tokens_dataset(lengths: Sequence[int], **options: Any) -> Dataset:
    """A dataset in RAM of documents of these lengths."""
    return penstock.from_arrays({"tokens": ragged(make_documents(lengths, **options))})


def write_tokens(
    path: Path, documents: Sequence[np.ndarray], *, shard_bytes: int = 200, attributes: Any = None, **columns: Any
) -> Path:
    """The documents (and other columns) as a folder of tiny shards."""
    specs = {"tokens": "uint32[*]"} | {name: spec for name, (spec, _) in columns.items()}
    with penstock.DatasetWriter(path, specs, shard_bytes=shard_bytes, attributes=attributes) as writer:
        for number, document in enumerate(documents):
            writer.write({"tokens": document} | {name: values[number] for name, (_, values) in columns.items()})
    return path


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for one example of a property test."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Both batches hold the same, to the bit and the dtype."""
    assert list(one) == list(other)
    for key, value in one.items():
        if isinstance(value, penstock.Ragged):
            assert [np.asarray(s).tolist() for s in value] == [np.asarray(s).tolist() for s in other[key]], key
        elif isinstance(value, np.ndarray):
            assert value.dtype == other[key].dtype, key
            np.testing.assert_array_equal(value, other[key], err_msg=key)
        else:
            assert type(value) is type(other[key]), key
            assert value == other[key], key


def read_epoch(plan: Plan, epoch: int = 0) -> list[dict[str, Any]]:
    """All batches that start in an epoch."""
    return [plan.read(step, epoch) for step in range(plan.num_batches(epoch))]


def packed_reference(
    plan: Plan, documents: Documents, traces: Sequence[DocumentTrace], num_rows: int, masks: Documents | None = None
) -> dict[str, Any]:
    """What a packed batch must hold, place by place, from the list of what lies where."""
    stage = next(stage for stage in plan.stages if stage.verb == "pack")
    length, pad = stage.settings.length, stage.pad
    input_ids = np.full((num_rows, length), pad, np.int64)
    labels = np.full((num_rows, length), IGNORED, np.int64)
    positions = np.zeros((num_rows, length), np.int64)
    ids = np.full((num_rows, length), -1, np.int32)
    borders = [0]
    for row in range(num_rows):
        at = 0
        for number, trace in enumerate(traces):
            if trace.row != row:
                continue
            assert trace.column == at
            for place in range(trace.size):
                here = at + place
                token = int(documents[trace.document][trace.start + place])
                is_target = place > 0 and (masks is None or bool(masks[trace.document][trace.start + place]))
                input_ids[row, here] = token
                ids[row, here] = number
                positions[row, here] = place + (trace.start if stage.positions == "continue" else 0)
                if is_target and stage.labels == "next":
                    labels[row, here - 1] = token
                if is_target and stage.labels == "same":
                    labels[row, here] = token
            at += trace.size
            borders.append(row * length + at)
        if at < length:
            for place in range(at, length):
                positions[row, place] = place - at
            borders.append((row + 1) * length)
    longest = max((b - a for a, b in pairwise(borders)), default=0)
    if stage.settings.max_documents is not None:
        borders += [borders[-1]] * (num_rows * (stage.settings.max_documents + 1) + 1 - len(borders))
    num_targets = int((labels != IGNORED).sum())
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": positions,
        "document_ids": ids,
        "cu_seqlens": np.array(borders, np.int32),
        "max_seqlen": longest,
        "num_documents": len(traces),
        "num_targets": num_targets,
        "num_targets_global": num_targets,
    }


lengths_lists = st.one_of(
    st.lists(st.integers(0, 20), min_size=1, max_size=30),
    st.lists(st.just(5), min_size=1, max_size=30),
    st.lists(st.just(1), min_size=1, max_size=40),
    st.lists(st.just(9), min_size=1, max_size=20),  # a row of 8 and one more
    st.builds(lambda long, rest: [long, *rest], st.integers(60, 100), st.lists(st.integers(0, 3), max_size=5)),
    st.just([1]),
)


def shuffled(source: Any, draw: st.DrawFn) -> Any:
    """The source in any of the orders there are."""
    order = draw(st.sampled_from(["none", "windows", "full"]))
    if order == "none":
        return source
    return source.shuffle(draw(st.integers(-3, 2**40)), order, draw(st.integers(1, 3)))
