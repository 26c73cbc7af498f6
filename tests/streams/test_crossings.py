"""Parts that tell each other what they read at their borders read the same records as parts that do not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.streams import PartRun, Recipe

from .examples import KeptCrossings, as_counted, folders, read_all, recipe_of, write

_ORDERS = st.integers(1, 9).flatmap(lambda num_parts: st.permutations(range(num_parts)))


def read_in_turns(recipe: Recipe, order: list[int], forgets: int, stride: int) -> list[list[dict[str, Any]]]:
    """Records of each part; some parts of `order` at a time take turns, record by record."""
    crossings = KeptCrossings(forgets)
    records: list[list[dict[str, Any]]] = [[] for _ in order]
    for parts in (order[begin : begin + stride] for begin in range(0, len(order), stride)):
        runs = [PartRun(recipe, part=part, num_parts=len(order), epoch=0, crossings=crossings) for part in parts]
        for turn in itertools.zip_longest(*runs):
            for part, record in zip(parts, turn, strict=True):
                records[part] += [] if record is None else [record]
    return records


@pytest.mark.parametrize("kind", ["text", "jsonl", "tsv"])
@settings(max_examples=30, deadline=None)
@given(st.data(), _ORDERS, st.integers(0, 3), st.integers(1, 4), st.integers(16, 300), st.sampled_from([0, 5]))
def test_each_part_has_its_records_in_whatever_order_parts_are_read(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
    order: list[int],
    forgets: int,
    stride: int,
    block: int,
    buffer: int,
) -> None:
    _, files, reading = data.draw(folders([kind]))
    paths, expected = write(tmp_path_factory.mktemp("files"), files)
    recipe = recipe_of(paths, block_bytes=block, reading=reading, shuffle_buffer=buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.streams._run._CHUNK_BYTES", 40)  # of 32 MB
        found = read_in_turns(recipe, order, forgets, stride)
        assert as_counted([*itertools.chain(*found)]) == as_counted(expected)
        parts = range(len(order))
        alone = [list(PartRun(recipe, part=part, num_parts=len(order), epoch=0)) for part in parts]
    assert found == alone


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=6), max_size=8),
    st.sampled_from(["\n\n", "ab", "aa", "aba", "-"]),
    _ORDERS,
    st.integers(0, 3),
)
def test_documents_between_separators_that_overlap_are_cut_as_without(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], separator: str, order: list[int], forgets: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "crossing.txt"
    path.write_text(separator.join(pieces))
    recipe = recipe_of(path, block_bytes=5, reading={"text_unit": "separator", "separator": separator})
    assert [*itertools.chain(*read_in_turns(recipe, order, forgets, 2))] == read_all(recipe, len(order))
