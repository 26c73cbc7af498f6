"""Datasets one after the other and side by side give the batches of one that holds all of it."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import DatasetChanged, SchemaError
from penstock.packing import _ledger
from penstock.plan import Dataset
from plan.examples import assert_same, make_documents, ragged, write_tokens

from .test_storage import LENGTHS, STAGES, arrays

FRACTIONS = {"train": 0.7, "val": 0.3}


def write_part(folder: Path, begin: int, end: int) -> Dataset:
    """A range of the documents of `arrays`, in shards of a few."""
    masks = [np.arange(length) % 3 != 0 for length in LENGTHS]
    extra = {"loss_mask": ("bool[*]", masks[begin:end]), "x": ("int32", list(range(begin, end)))}
    return penstock.open(write_tokens(folder, make_documents(LENGTHS)[begin:end], shard_bytes=60, **extra))


@pytest.fixture
def joined(tmp_path: Path) -> Dataset:
    """All documents: of two folders, of RAM, and of a dataset from which some are picked; the second part is empty."""
    picked = arrays().take(np.arange(len(LENGTHS))[40:])
    empty = arrays().take(np.empty(0, np.int64))
    return penstock.concat(write_part(tmp_path / "a", 0, 13), empty, write_part(tmp_path / "b", 13, 40), picked)


def zipped() -> Dataset:
    """The same documents, their columns from three places."""
    one, more = arrays(), arrays().take(np.arange(len(LENGTHS)))
    tokens = one.select_columns(["tokens"])
    return tokens.zip(more.select_columns(["loss_mask"])).zip(one.select_columns(["x"]))


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("how", ["concat", "zip", "pickled"])
def test_every_plan_gives_the_batches_of_one_dataset_that_holds_all_of_it(
    joined: Dataset, how: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ledger, "ROWS_PER_WINDOW", 4)
    data = {"concat": joined, "zip": zipped(), "pickled": pickle.loads(pickle.dumps(joined))}[how]
    expected, found = STAGES[kind](arrays()), STAGES[kind](data)
    assert len(data) == len(LENGTHS)
    for step in range(expected.num_batches()):
        assert_same(expected.read(step), found.read(step))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    data=st.data(),
)
def test_samples_of_joined_datasets_are_those_of_their_parts(sizes: list[int], data: st.DataObject) -> None:
    columns = {"x": np.arange(sum(sizes)), "r": ragged(make_documents([n % 4 for n in range(sum(sizes))]))}
    whole = penstock.from_arrays(columns) if sum(sizes) else None
    edges = np.cumsum([0, *sizes])
    base = penstock.from_arrays({"x": np.arange(9), "r": ragged(make_documents([n % 4 for n in range(9)]))})
    parts = [base.take([]) if whole is None else whole.take(np.arange(a, b)) for a, b in itertools.pairwise(edges)]
    joined = penstock.concat(*parts)
    assert len(joined) == sum(sizes)
    if whole is None:
        return
    indices = data.draw(st.lists(st.integers(-sum(sizes), sum(sizes) - 1), max_size=12))
    assert_same(whole.read(indices), joined.read(indices))
    assert joined.lengths("r").tolist() == whole.lengths("r").tolist()
    for index in indices:
        assert joined[index]["x"] == whole[index]["x"]
        assert joined[index]["r"].tolist() == whole[index]["r"].tolist()
    with pytest.raises(IndexError):
        joined.read([sum(sizes)])


def test_a_sample_keeps_its_part_of_a_split_when_datasets_are_joined(joined: Dataset) -> None:
    expected = {name: set(part[:]["x"].tolist()) for name, part in arrays().split(FRACTIONS, seed=3).items()}
    for data in (joined, zipped()):
        found = {name: set(part[:]["x"].tolist()) for name, part in data.split(FRACTIONS, seed=3).items()}
        assert found == expected
        by_column = data.split(FRACTIONS, seed=3, by="x")
        assert sum(map(len, by_column.values())) == len(LENGTHS)


def test_joined_datasets_have_an_identity_of_their_own(joined: Dataset) -> None:
    a, b = arrays().take([1, 2]), arrays().take([3])
    prints = [each.fingerprint for each in (penstock.concat(a, b), penstock.concat(b, a), penstock.concat(a, b, b), a)]
    assert len(set(prints)) == 4
    assert penstock.concat(a, b).fingerprint == prints[0]
    assert pickle.loads(pickle.dumps(joined)).fingerprint == joined.fingerprint
    assert "concat of 4 datasets: 64 samples" in repr(joined)


def test_a_part_that_changed_is_noticed(tmp_path: Path) -> None:
    joined = penstock.concat(write_part(tmp_path / "a", 0, 5), write_part(tmp_path / "b", 5, 9))
    packed = pickle.dumps(joined)
    with penstock.DatasetWriter(tmp_path / "b", {"tokens": "uint16[*]"}, mode="overwrite") as writer:
        writer.write({"tokens": [1]})
    with pytest.raises(DatasetChanged):
        pickle.loads(packed)


def test_plan_files_hold_joined_datasets(tmp_path: Path) -> None:
    one, other = write_part(tmp_path / "a", 0, 20), write_part(tmp_path / "b", 20, 40)
    with penstock.DatasetWriter(tmp_path / "c", {"y": "int64"}) as writer:
        writer.write_batch({"y": np.arange(40)})
    train = penstock.concat(one, other).zip(penstock.open(tmp_path / "c")).split(FRACTIONS, seed=1)["train"]
    plan = train.shuffle(seed=2).batch(4)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    again = penstock.load_plan(tmp_path / "plan.toml")
    assert again.fingerprint == plan.fingerprint
    assert_same(plan.read(3), again.read(3))


def test_every_engine_reads_joined_datasets(joined: Dataset) -> None:
    plan = joined.zip(penstock.from_arrays({"y": np.arange(len(LENGTHS))})).shuffle(seed=1).pack(16).batch(4)
    expected = [batch["input_ids"].tolist() for batch in penstock.DataLoader(plan, num_workers=0)]
    for workers in ("thread", "process"):
        with penstock.DataLoader(plan, num_workers=2, workers=workers) as loader:
            assert [batch["input_ids"].tolist() for batch in loader] == expected


def test_origins_are_those_of_the_parts(tmp_path: Path) -> None:
    rows = [{"x": number} for number in range(4)]
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"x": {row["x"]}}}\n' for row in rows))
        penstock.prepare(tmp_path / f"{name}.jsonl", tmp_path / name, workers=1)
    joined = penstock.concat(penstock.open(tmp_path / "a"), penstock.open(tmp_path / "b"))
    assert str(tmp_path / "b.jsonl") in str(joined.origin(5))
    assert sum(map(len, joined.split(FRACTIONS, seed=0, by="file").values())) == 8


def test_a_plan_says_that_datasets_come_one_after_the_other() -> None:
    parts = [penstock.from_arrays({"x": np.zeros((3000, 1 << 11), np.uint8)}) for _ in range(3)]
    (found,) = penstock.concat(*parts).shuffle(1, mode="windows", group=1).batch(64).mixing()
    assert found.what == "which dataset of concat() a sample is from"
    assert found.variance > 10


def tokens(folder: Path, digest: str) -> Dataset:
    known: dict[str, Any] = {"tokenizer": {"name": digest, "sha256": digest}}
    with penstock.DatasetWriter(folder, {"tokens": "uint16[*]"}, attributes=known) as writer:
        writer.write({"tokens": [1]})
    return penstock.open(folder)


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    x, y = penstock.from_arrays({"x": np.arange(3)}), penstock.from_arrays({"x": np.arange(3.0)})
    with pytest.raises(SchemaError, match="dataset 1 has x: float64"):
        penstock.concat(x, y)
    with pytest.raises(ValueError, match="at least one dataset"):
        penstock.concat()
    with pytest.raises(TypeError, match="argument 1 is Plan"):
        penstock.concat(x, x.shuffle(seed=1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"argument 0 is list; give datasets, .*concat\(\*datasets\)"):
        penstock.concat([x, x])  # type: ignore[arg-type]
    for no_dataset in (x.shuffle(seed=1), np.arange(3), {"z": np.arange(3)}):
        with pytest.raises(TypeError, match=r"zip\(\): a dataset is needed, not .*penstock.from_arrays makes one"):
            x.zip(no_dataset)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one dataset has 3 samples, the other 2"):
        x.zip(penstock.from_arrays({"z": np.arange(2)}))
    with pytest.raises(SchemaError, match="both have a column 'x'"):
        x.zip(y)
    one, other = tokens(tmp_path / "a", "abc"), tokens(tmp_path / "b", "def")
    with pytest.raises(ValueError, match=r"different tokenizers.*abc \(abc\), def \(def\)"):
        penstock.concat(one, other)
    assert len(penstock.concat(one, other, different_tokenizers=True)) == 2
    assert penstock.concat(one, one).tokenizers == {"abc": "abc"}


def test_labels_that_mean_different_classes_are_not_joined(tmp_path: Path) -> None:
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "emu"])):
        with penstock.DatasetWriter(tmp_path / name, {"label": "int64"}, attributes={"classes": classes}) as writer:
            writer.write({"label": 0})
    with pytest.raises(ValueError, match="labels mean different classes"):
        penstock.concat(penstock.open(tmp_path / "a"), penstock.open(tmp_path / "b"))


def test_labels_that_mean_different_classes_are_not_mixed(tmp_path: Path) -> None:
    for name, classes in (("a", ["cat", "dog"]), ("b", ["dog", "emu"]), ("c", ["cat", "dog"])):
        with penstock.DatasetWriter(tmp_path / name, {"label": "int64"}, attributes={"classes": classes}) as writer:
            writer.write({"label": 0})
    a, b, c = (penstock.open(tmp_path / name).shuffle(seed=1) for name in "abc")
    unnamed = penstock.from_arrays({"label": np.zeros(3, np.int64)}).shuffle(seed=1)
    alike = penstock.mix({"a": (a, 1), "c": (c, 1), "unnamed": (unnamed, 1)}, seed=0, rows=6)
    for others in ({"a": (a, 1)}, {"mixed": (alike, 1)}):
        with pytest.raises(ValueError, match=r"mix\(\): labels mean different classes: \['cat', 'dog'\] in one"):
            penstock.mix({**others, "b": (b, 1)}, seed=0, rows=6)


def test_a_zip_of_datasets_without_samples_has_the_columns_of_both() -> None:
    x, y = penstock.from_arrays({"x": np.arange(3)}), penstock.from_arrays({"y": np.ones((3, 2))})
    none = x.filter(x=7).zip(y.take(np.empty(0, np.int64)))
    assert {name: column.shape for name, column in none[:].items()} == {"x": (0,), "y": (0, 2)}


def test_zip_compares_columns_that_both_have() -> None:
    names = penstock.from_arrays({"id": np.arange(5), "x": np.arange(5) * 2})
    fitting = penstock.from_arrays({"id": np.arange(5), "y": np.arange(5) * 3})
    assert list(names.zip(fitting, on="id").schema) == ["id", "x", "y"]
    with pytest.raises(
        ValueError, match=r"zip\(on='id'\): sample 0 has np.int64\(0\) in one dataset and np.int64\(4\)"
    ):
        names.zip(fitting.take([4, 3, 2, 1, 0]), on="id")


def test_a_condition_reads_only_its_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = write_part(tmp_path / "a", 0, 40)
    read: list[str] = []
    fixed = type(ds.storage).read_fixed
    monkeypatch.setattr(
        type(ds.storage),
        "read_fixed",
        lambda self, column, *rest: (read.append(column.name), fixed(self, column, *rest)),
    )
    monkeypatch.setattr(type(ds.storage), "read_ragged", lambda *_: pytest.fail("a column that nobody asked for"))
    kept = ds.filter(x=lambda x: x % 3 == 0)
    assert set(read) == {"x"}
    monkeypatch.undo()
    assert kept[:]["x"].tolist() == list(range(0, 40, 3))


@given(wanted=st.lists(st.integers(0, 9)), least=st.integers(0, 30))
@settings(max_examples=20, deadline=None)
def test_conditions_are_those_of_a_mask(wanted: list[int], least: int) -> None:
    x, label = np.arange(30), np.arange(30) * 7 % 10
    ds = penstock.from_arrays({"x": x, "label": label, "name": [b"%d" % value for value in label]})
    expected = ds.filter(np.isin(label, wanted) & (x >= least))
    found = ds.filter(label=wanted, x=lambda x: x >= least)
    assert found.fingerprint == expected.fingerprint
    assert ds.filter(name=[str(value) for value in wanted]).fingerprint == ds.filter(label=wanted).fingerprint
    assert len(ds.filter(label=3)) == len(ds.filter(name=np.array(["3"]))) == 3


def test_conditions_that_make_no_sense_are_refused() -> None:
    ds = penstock.from_arrays({"x": np.arange(3), "v": np.zeros((3, 2)), "name": [b"a", b"b", b"c"]})
    for arguments, error, message in (
        ({}, TypeError, "either a mask or conditions"),
        ({"y": 1}, SchemaError, "No column 'y'"),
        ({"v": 1}, SchemaError, "give a function of its values"),
        ({"x": lambda x: 1}, ValueError, "must give 3 bools"),
        ({"x": "cat"}, SchemaError, r"filter\(x='cat'\): the column is int64; compare it with numbers"),
        ({"x": [1, None]}, SchemaError, r"filter\(x=None\): the column is int64"),
        ({"name": 3}, SchemaError, r"filter\(name=3\): the column is bytes; compare it with texts"),
    ):
        with pytest.raises(error, match=message):
            ds.filter(**arguments)
    with pytest.raises(TypeError, match="needs the name of its column"):
        ds.filter(lambda sample: True)
