"""Documents with pictures: several byte strings per sample, from the source to the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import FormatError, SchemaError
from penstock.schema import Ragged

PICTURES = [[b"ab", b""], [], [b"xyz"], [b"", b"", b"w"], []]
SIZES = [np.full((len(each), 2), number) for number, each in enumerate(PICTURES)]
COLUMNS = {"tokens": [[number] * (number + 1) for number in range(5)], "pictures": PICTURES, "sizes": SIZES}
strings = st.lists(st.lists(st.binary(max_size=3), max_size=3), min_size=1, max_size=6)


@pytest.fixture(params=["memory", "folder", "joined"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        return penstock.from_arrays(COLUMNS)
    with penstock.DatasetWriter(
        tmp_path, {"tokens": "int64[*]", "pictures": "bytes[*]", "sizes": "int64[*,2]"}, shard_bytes=100
    ) as writer:
        writer.write_batch(COLUMNS)
    ds = penstock.open(tmp_path)
    return ds if request.param == "folder" else penstock.concat(ds.take(range(2)), ds.take(range(2, 5)))


@pytest.mark.parametrize("keep", ["pack", "pad"])
def test_pictures_and_their_sizes_come_with_their_documents(keep: str, dataset: Any) -> None:
    plan = getattr(dataset.shuffle(seed=1), keep)(6, keep=["pictures", "sizes"]).batch(3)
    batch = plan.read(0)
    tokens = batch["input_ids"]
    if keep == "pack":
        documents = [int(tokens[batch["document_ids"] == number][0]) for number in range(batch["num_documents"])]
    else:
        documents = tokens[:, 0].tolist()
    assert documents
    assert list(batch["pictures"]) == [PICTURES[each] for each in documents]
    assert all(np.array_equal(got, SIZES[each]) for got, each in zip(batch["sizes"], documents, strict=True))


def test_lengths_count_the_pictures(dataset: Any) -> None:
    assert dataset.lengths("pictures").tolist() == [2, 0, 1, 3, 0]
    assert dataset[3]["pictures"] == PICTURES[3]
    assert [sample["pictures"] for sample in (dataset[-1], dataset[0])] == [[], PICTURES[0]]


def test_samples_with_pictures_are_told_apart_by_them(dataset: Any) -> None:
    only = dataset.select_columns(["pictures"])
    parts = only.split({"a": 0.5, "b": 0.5}, seed=3)
    others = only.take([4, 3, 2, 1, 0]).split({"a": 0.5, "b": 0.5}, seed=3)
    for name, part in parts.items():
        assert sorted(map(list, part[:]["pictures"])) == sorted(map(list, others[name][:]["pictures"]))
    assert sum(map(len, parts.values())) == 5


def test_a_map_gets_lists_and_may_return_them(dataset: Any) -> None:
    def turn(row: Any) -> Any:
        return {"pictures": [each[::-1] for each in row["pictures"]][::-1]}

    batch = dataset.select_columns(["pictures"]).map(turn).batch(5, tail="short").read(0)
    assert list(batch["pictures"]) == [[each[::-1] for each in row][::-1] for row in PICTURES]


def test_a_mixture_keeps_pictures_with_their_documents(dataset: Any) -> None:
    other = penstock.from_arrays({**COLUMNS, "tokens": [[each + 9 for each in row] for row in COLUMNS["tokens"]]})
    sources = {"a": dataset, "b": other}
    packed = {name: each.shuffle(seed=2).pack(6, keep=["pictures"]) for name, each in sources.items()}
    batch = penstock.mix({name: (each, 1.0) for name, each in packed.items()}, seed=1, rows=8).batch(4).read(0)
    firsts = [
        int(batch["input_ids"][batch["document_ids"] == number][0]) % 9 for number in range(batch["num_documents"])
    ]
    assert list(batch["pictures"]) == [PICTURES[each] for each in firsts]


@given(strings, st.data())
def test_nested_samples_are_taken_joined_and_sliced_as_lists_are(rows: list[list[bytes]], data: st.DataObject) -> None:
    ragged = penstock.from_arrays({"x": [*rows, [b"seen"]]})[:]["x"]
    rows = [*rows, [b"seen"]]
    assert list(ragged) == rows
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    assert list(ragged.take(np.array(picked, np.int64))) == [rows[each] for each in picked]
    chosen = sorted(set(picked))
    assert list(ragged.take(np.array(chosen, np.int64))) == [rows[each] for each in chosen]
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows)))))
    assert list(ragged[begin:end]) == rows[begin:end]
    assert list(Ragged.concatenate([ragged[begin:end], ragged])) == rows[begin:end] + rows
    sizes = ragged[begin:end].parts[1]
    assert [each.tolist() for each in sizes] == [list(map(len, row)) for row in rows[begin:end]]


def test_what_is_no_list_of_byte_strings_is_refused(tmp_path: Path) -> None:
    with penstock.DatasetWriter(tmp_path, {"x": "bytes[*]"}) as writer:
        writer.write({"x": [b"a"]})
        for wrong in (b"ab", 5, None):
            with pytest.raises(SchemaError, match="Column 'x' holds lists of byte strings; this sample is"):
                writer.write({"x": wrong})
        for inside in (["ab"], [7]):
            with pytest.raises(SchemaError, match="Column 'x' holds bytes"):
                writer.write({"x": inside})
    assert penstock.open(tmp_path)[:]["x"].parts[0].values.tobytes() == b"a"


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_loader_hands_over_lists_of_byte_strings(workers: str, dataset: Any) -> None:
    plan = dataset.shuffle(seed=1).pack(6, keep=["pictures", "sizes"]).batch(2)
    loader = penstock.DataLoader(plan, num_workers=1, workers=workers)
    with loader:
        batch = next(iter(loader))
    expected = plan.read(0)
    assert batch["pictures"] == list(expected["pictures"])
    assert batch["sizes"].values.tolist() == expected["sizes"].values.tolist()


def test_lists_of_byte_strings_are_kept_by_prepare(tmp_path: Path) -> None:
    source = [{"x": each, "n": number} for number, each in enumerate(PICTURES)]
    penstock.prepare(source, tmp_path / "ds", workers=1)
    ds = penstock.open(tmp_path / "ds")
    assert ds.schema.to_json() == {"x": "bytes[*]", "n": "int64"}
    assert list(ds[:]["x"]) == PICTURES
    assert penstock.verify(tmp_path / "ds").is_sound


def budgeted(num: int = 400, seed: int = 0) -> Any:
    """Documents that say their number in every token, with pictures to match, and what a map would make of them."""
    rng = np.random.default_rng(seed)
    pictures = rng.integers(0, 5, num)
    lengths = rng.integers(1, 20, num)
    return penstock.from_arrays(
        {
            "tokens": [np.full(size, number) for number, size in enumerate(lengths)],
            "images": [[b"%d" % number] * count for number, count in enumerate(pictures.tolist())],
            "num_images": pictures,
            "num_tokens": lengths + 10 * pictures,
        }
    )


@pytest.mark.parametrize("limit", ["num_images", "images"])
def test_rows_hold_no_more_pictures_than_the_limit_says(limit: str) -> None:
    dataset = budgeted()
    plan = dataset.shuffle(seed=3).pack(64, limits={limit: 6}, long="drop", keep="images").batch(4, tail="short")
    seen = []
    for step in range(-(-plan.num_rows // 4)):
        batch = plan.read(step)
        for row in batch["document_ids"]:
            documents = np.unique(row[row >= 0])
            assert sum(len(batch["images"][each]) for each in documents) <= 6
        for document, pictures in enumerate(batch["images"]):
            tokens = batch["input_ids"][batch["document_ids"] == document]
            assert pictures == dataset[int(tokens[0])]["images"]
            seen.append(int(tokens[0]))
    assert sorted(seen) == list(range(400))
    ledger = plan.ledger()
    assert ledger.packing is not None
    assert ledger.packing.fills[1] > 0.99
    assert f"{limit}" in str(ledger)


def test_rows_leave_the_room_that_a_cost_asks_for() -> None:
    dataset = budgeted()
    plan = dataset.shuffle(seed=3).pack(64, cost="num_tokens", limits={"num_images": 6}, long="drop", keep="num_tokens")
    batch = plan.batch(4, tail="short").read(0)
    for row in batch["document_ids"]:
        assert batch["num_tokens"][np.unique(row[row >= 0])].sum() <= 64
    assert int(batch["num_targets"]) == int((batch["labels"] != -100).sum())
    ledger = plan.batch(4).ledger()
    assert ledger.packing is not None
    assert ledger.packing.num_tokens == dataset[:]["num_tokens"].sum()
    assert max(ledger.packing.fills) > 0.95


def test_a_state_and_a_plan_file_know_the_budgets(tmp_path: Path) -> None:
    with penstock.DatasetWriter(tmp_path / "ds", {"tokens": "int64[*]", "n": "int64"}) as writer:
        writer.write_batch({"tokens": [[1, 2]] * 9, "n": [1] * 9})
    plan = penstock.open(tmp_path / "ds").shuffle(1).pack(8, limits={"n": 2}, cost="n", long="drop").batch(2)
    assert ".pack(length=8, long='drop', limits={'n': 2}, cost='n')" in repr(plan)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml").fingerprint == plan.fingerprint
    other = penstock.open(tmp_path / "ds").shuffle(1).pack(8, limits={"n": 3}, cost="n", long="drop").batch(2)
    assert other.order_fingerprint != plan.order_fingerprint
    assert "limits={'n': 2}" in plan.order_facts["pack"]


def test_what_cannot_be_a_budget_is_refused() -> None:
    dataset = budgeted(9)
    with pytest.raises(ValueError, match="documents that cost more than their tokens are not cut"):
        dataset.pack(64, cost="num_tokens")
    with pytest.raises(SchemaError, match="No column 'pages'"):
        dataset.pack(64, limits={"pages": 3}, long="drop")
    wrong = penstock.from_arrays({"tokens": [[1], [2, 3]], "x": [0.5, 1.0], "n": [1, -1], "cost": [0, 9]})
    with pytest.raises(SchemaError, match="column 'x' is float64; a budget needs a whole number"):
        wrong.pack(64, limits={"x": 3}, long="drop")
    with pytest.raises(FormatError, match="Column 'n' of sample 1 is not a number from 0"):
        wrong.pack(64, limits={"n": 3}, long="drop")
    few = penstock.from_arrays({"tokens": [[1, 2], [2]], "cost": [1, 9]})
    with pytest.raises(FormatError, match="Sample 0 has 2 tokens, more than its 'cost'"):
        few.pack(64, cost="cost", long="drop").batch(1, tail="short").read(0)
