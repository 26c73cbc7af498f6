"""Row counts per window: how documents are cut into windows, and where the counts are kept."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import FormatError
from penstock.packing import (
    PACKING_VERSION,
    PackIndex,
    PackingSettings,
    _ledger,
    build_pack_index,
    count_rows,
    index_name,
)
from penstock.plan import _pack_index
from penstock.plan._stages import Pack
from plan.examples import assert_same, make_documents, read_epoch, tokens_dataset, write_tokens


def reader(lengths: np.ndarray) -> Any:
    return lambda begin, end: lengths[begin:end]


def cut(lengths: Any, length: int = 4) -> PackIndex:
    lengths = np.array(lengths, np.int64)
    return build_pack_index(reader(lengths), len(lengths), PackingSettings(length=length))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=80),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(1, 200),
)
def test_windows_cover_all_documents_and_are_large_but_for_the_bounds(
    lengths: list[int], rows: int, max_documents: int, chunk: int, max_tokens: int
) -> None:
    length = 4
    with pytest.MonkeyPatch.context() as patch:
        bounds = {"ROWS_PER_WINDOW": rows, "MAX_WINDOW_DOCUMENTS": max_documents, "MAX_WINDOW_TOKENS": max_tokens}
        for name, value in (bounds | {"_CHUNK": chunk}).items():
            patch.setattr(_ledger, name, value)
        index = cut(lengths, length)
        patch.setattr(_ledger, "_CHUNK", 1 << 22)
        assert cut(lengths, length).window_starts.tolist() == index.window_starts.tolist()
    starts = index.window_starts.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(lengths)
    target = min(rows * length, max_tokens)
    windows = [lengths[begin:end] for begin, end in pairwise(starts)]
    for number, window in enumerate(windows):
        assert window
        is_only = len(windows) == 1
        assert sum(window) >= target or len(window) >= max_documents or is_only
        if number < len(windows) - 1:  # only the last takes in a rest that is too small
            assert sum(window[:-1]) < target
            assert len(window) <= max_documents
        expected = count_rows(np.array(window, np.int64), PackingSettings(length=length))
        assert index.rows_per_window[number] == expected


def test_windows_hold_16384_rows_worth_of_tokens() -> None:
    lengths = np.random.default_rng(0).integers(100, 900, 100_000)
    index = cut(lengths, 512)
    tokens = np.add.reduceat(lengths, index.window_starts[:-1])
    assert len(tokens) == lengths.sum() // (16_384 * 512)
    assert (tokens >= 16_384 * 512).all()
    assert (tokens[:-1] < 16_384 * 512 + 900).all()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that keeps indexes of any size, with windows of two rows."""
    monkeypatch.setattr(_pack_index, "_WORTH_KEEPING", 0)
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 2)
    monkeypatch.setattr(_pack_index, "cache_folder", lambda: tmp_path / "cache" / "packing")
    return tmp_path / "cache" / "packing"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each time that rows are counted."""
    calls: list[int] = []
    honest = _pack_index.build_pack_index

    def counting(*arguments: Any, **options: Any) -> PackIndex:
        calls.append(threading.get_ident())
        time.sleep(0.05)
        return honest(*arguments, **options)

    monkeypatch.setattr(_pack_index, "build_pack_index", counting)
    return calls


LENGTHS = [3, 7, 0, 2, 9, 20] * 5


def test_counts_are_kept_and_used_again(cache: Path, built: list[int]) -> None:
    first = tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(4)
    (kept,) = cache.glob("*.json")
    assert len(built) == 1
    second = tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(4)
    assert_same(first.read(1), second.read(1))
    assert len(built) == 1
    tokens_dataset([5]).pack(8)
    dataset = tokens_dataset(LENGTHS)
    for other in ({"length": 9}, {"length": 8, "long": "drop"}, {"length": 8, "max_documents": 2}):
        dataset.pack(**other)
    dataset.take([0, 1]).pack(8)
    assert len(built) == 6
    assert kept.exists()
    assert not [path for path in cache.iterdir() if path.suffix not in (".json", ".lock")]


@pytest.mark.parametrize(
    "damage", ["empty", "truncated", "flipped", "binary", "other documents", "not an index", "folder"]
)
def test_a_damaged_file_is_counted_again_and_replaced(cache: Path, built: list[int], damage: str) -> None:
    expected = tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(4).read(1)
    (kept,) = cache.glob("*.json")
    good = kept.read_bytes()
    if damage == "other documents":
        _pack_index._keep(kept, PackIndex(np.array([0, 3]), np.array([1])))
    elif damage == "not an index":
        text = json.dumps([1, 2])
        kept.write_text(f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}\n{text}")
    elif damage == "folder":
        kept.unlink()
        kept.mkdir()
    else:
        kept.write_bytes(
            {
                "empty": b"",
                "truncated": good[:-5],
                "flipped": good[:-5] + bytes([good[-5] ^ 1]) + good[-4:],
                "binary": b"\xff\xfe\x00",
            }[damage]
        )
    assert_same(tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(4).read(1), expected)
    assert len(built) == 2
    if damage != "folder":
        assert kept.read_bytes() == good


def test_one_builds_and_the_others_wait_for_it(cache: Path, built: list[int]) -> None:
    """Asked below the plan: a cached property of Python 3.11 lets one thread in at a time by itself."""
    found = []

    def build() -> None:
        stage = Pack(settings=PackingSettings(length=8))
        index = _pack_index.find_pack_index(tokens_dataset(LENGTHS).samples, stage, None)
        found.append(index.rows_per_window.tolist())

    threads = [threading.Thread(target=build, name=f"builder-{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert found == [found[0]] * 4


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(
    cache: Path, built: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file is in the way")
    with caplog.at_level(logging.WARNING):
        plan = tokens_dataset(LENGTHS).shuffle(1).pack(8)
    assert plan.num_rows > 0
    assert len(built) == 1
    assert "Row counts are not kept" in caplog.text


@pytest.mark.parametrize("exposed", [".", ".."])
def test_a_cache_that_others_can_write_to_is_neither_read_nor_written(
    cache: Path, built: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture, exposed: str
) -> None:
    """They could have put links there, over which something precious would be written."""
    expected = tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(4).read(1)
    precious = tmp_path / "thesis.tex"
    precious.write_text("irreplaceable")
    for path in [*cache.iterdir()]:
        path.unlink()
        path.symlink_to(precious)
    (cache / exposed).chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert_same(tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(4).read(1), expected)
    assert precious.read_text() == "irreplaceable"
    assert "Others can write to" in caplog.text
    assert len(built) == 2


def test_small_data_is_counted_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pack_index, "cache_folder", lambda: tmp_path / "cache")
    tokens_dataset(LENGTHS).pack(8)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("given", "home", "expected"),
    [
        ("/caches", "/home/ada", "/caches/penstock/packing"),
        ("", "/home/ada", "/home/ada/.cache/penstock/packing"),
        ("caches", "/home/ada", "/home/ada/.cache/penstock/packing"),  # would be another one in each current folder
        ("", "nowhere", None),
    ],
)
def test_row_counts_are_kept_below_the_cache_folder_of_the_user(
    given: str, home: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", home)
    assert _pack_index.cache_folder() == (None if expected is None else Path(expected))


def test_without_a_home_rows_are_counted_and_nothing_is_written(
    cache: Path, built: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pack_index, "cache_folder", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert tokens_dataset(LENGTHS).pack(8).num_rows > 0
    assert len(built) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_packed_plan_whose_rows_were_counted_opens_without_its_shards(
    cache: Path, built: list[int], tmp_path: Path
) -> None:
    """Opening costs the manifest, however many shards and documents there are."""
    path = write_tokens(tmp_path / "d", make_documents(LENGTHS))
    num_batches = penstock.open(path).shuffle(1).pack(8).batch(4).num_batches()
    for shard in path.glob("shard-*"):
        shard.unlink()
    plan = penstock.open(path).shuffle(1).pack(8).batch(4)
    assert (plan.num_batches(), len(built)) == (num_batches, 1)
    with pytest.raises(penstock.errors.PenstockError, match="shard-"):
        plan.read(0)


def stored(indexes: Any, version: Any = PACKING_VERSION) -> dict[str, Any]:
    return {"packing": {"version": version, "indexes": indexes}}


NAME = index_name("tokens", PackingSettings(length=8))


def test_counts_stored_with_the_dataset_are_used(
    tmp_path: Path, built: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 2)
    index = build_pack_index(reader(np.array(LENGTHS)), len(LENGTHS), PackingSettings(length=8))
    path = write_tokens(tmp_path / "d", make_documents(LENGTHS), attributes=stored({NAME: index.to_json()}))
    plan = penstock.open(path).shuffle(1).pack(8).batch(4, tail="short")
    assert built == []
    reference = tokens_dataset(LENGTHS).shuffle(1).pack(8).batch(4, tail="short")
    for one, other in zip(read_epoch(plan), read_epoch(reference), strict=True):
        assert_same(one, other)
    del built[:]
    penstock.open(path).pack(9)
    penstock.open(path).take(np.arange(5)).pack(8)  # the counts are of all documents
    penstock.open(path).pack(8, max_documents=3)
    assert len(built) == 3


@pytest.mark.parametrize(
    "attributes",
    [
        {"packing": 5},
        {"packing": []},
        stored({NAME: {}}, version=0),
        stored({}),
        stored(5),
        stored([NAME]),
        {"packing": {}},
    ],
)
def test_counts_of_another_version_or_kind_are_not_used(tmp_path: Path, built: list[int], attributes: Any) -> None:
    path = write_tokens(tmp_path / "d", make_documents(LENGTHS), attributes=attributes)
    penstock.open(path).pack(8)
    assert len(built) == 1


@pytest.mark.parametrize(
    "fields",
    [
        None,
        5,
        [],
        {},
        {"window_starts": None, "window_rows": None},
        {"window_starts": [], "window_rows": []},
        {"window_starts": [0, 30], "window_rows": []},
        {"window_starts": [0, 29], "window_rows": [5]},
        {"window_starts": [1, 30], "window_rows": [5]},
        {"window_starts": [0, 40, 30], "window_rows": [5, 5]},
        {"window_starts": [0, 30], "window_rows": [-5]},
        {"window_starts": [0, "x"], "window_rows": [5]},
        {"window_starts": [0, 2**70], "window_rows": [5]},
        {"window_starts": [[0], [30]], "window_rows": [5]},
        {"window_starts": [[0, 1], [30]], "window_rows": [5]},
        {"window_starts": 30, "window_rows": 5},
    ],
)
def test_counts_that_cannot_be_of_this_dataset_are_an_error_of_its_format(tmp_path: Path, fields: Any) -> None:
    path = write_tokens(tmp_path / "d", make_documents(LENGTHS), attributes=stored({NAME: fields}))
    with pytest.raises(FormatError, match=r"packing 'tokens 8 split None' stored with the dataset is not of its 30"):
        penstock.open(path).pack(8)


def test_counts_from_before_samples_were_appended_are_not_used(tmp_path: Path) -> None:
    documents = make_documents(LENGTHS)
    fields = {"window_starts": [0, len(documents)], "window_rows": [5]}
    kept = stored({NAME: fields})
    kept["packing"]["samples"] = len(documents)
    path = write_tokens(tmp_path / "d", documents, attributes=kept)
    with penstock.DatasetWriter(path, {"tokens": "uint32[*]"}, mode="append") as writer:
        writer.write({"tokens": [1, 2, 3]})
    whole = tokens_dataset([*LENGTHS, 3])
    assert penstock.open(path).pack(8).batch(1).num_batches() == whole.pack(8).batch(1).num_batches()


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_counts_that_are_wrong_are_noticed_before_a_row_is_read(tmp_path: Path, rows: int) -> None:
    """A row that is not there would be read from whatever lies behind the index."""
    fields = {"window_starts": [0, 10, 30], "window_rows": [30, rows]}
    path = write_tokens(tmp_path / "d", make_documents(LENGTHS), attributes=stored({NAME: fields}))
    plan = penstock.open(path).pack(8).batch(1)
    with pytest.raises(FormatError, match=r"packs into 30 rows of 8 tokens; it packs into \d+"):
        plan.read(0)


def test_rows_are_counted_once_for_all_stages_behind_pack(built: list[int]) -> None:
    plan = tokens_dataset(LENGTHS).shuffle(1).pack(8).map(dict, batched=True).batch(4)
    plan.read(0)
    penstock.mix({"a": (tokens_dataset([9]).pack(8), 1)}, seed=1, rows=4).batch(2).read(0)
    assert len(built) == 2
