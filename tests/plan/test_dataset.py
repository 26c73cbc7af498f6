"""A dataset by its interface, whatever holds the samples: shards, arrays, or parts of either."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import DatasetChanged, IncompleteDataset, SchemaError

NUM_SAMPLES = 100
LARGE = 2**63
COLUMNS = {"label": "int64", "image": "uint8[4,4]", "large": "float32[5000]", "tokens": "uint16[*]", "jpeg": "bytes"}


def columns_of(num_samples: int, start: int = 0) -> dict[str, Any]:
    numbers = np.arange(start, start + num_samples)
    return {
        "label": numbers,
        "image": np.broadcast_to(numbers[:, None, None] % 256, (num_samples, 4, 4)).astype(np.uint8),
        "large": np.broadcast_to(numbers[:, None], (num_samples, 5000)).astype(np.float32),
        "tokens": [np.full(number % 7, number, np.uint16) for number in numbers],
        "jpeg": [b"\xff" * (number % 3) for number in numbers.tolist()],
    }


def write(path: Path, num_samples: int = NUM_SAMPLES, **options: Any) -> Path:
    with penstock.DatasetWriter(path, COLUMNS, shard_bytes=300_000, **options) as writer:
        writer.write_batch(columns_of(num_samples))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("dataset") / "ds")


@pytest.fixture(params=["map", "pread", "ram", "take"])
def ds(request: pytest.FixtureRequest, folder: Path) -> penstock.Dataset:
    """The same samples in every kind of dataset."""
    if request.param == "ram":
        return penstock.from_arrays(columns_of(NUM_SAMPLES))
    if request.param == "take":
        return penstock.from_arrays(columns_of(NUM_SAMPLES + 9)).take(np.arange(NUM_SAMPLES))
    return penstock.open(folder, io=request.param)


def test_it_has_a_length_and_a_schema(ds: penstock.Dataset) -> None:
    assert len(ds) == NUM_SAMPLES
    assert ds.schema.to_json() == COLUMNS


def test_a_sample_is_a_dict_of_plain_values(ds: penstock.Dataset) -> None:
    sample = ds[8]
    assert list(sample) == list(COLUMNS)
    assert isinstance(sample["label"], np.int64)
    assert sample["label"] == 8
    assert sample["image"].tolist() == [[8] * 4] * 4
    assert sample["tokens"].tolist() == [8]
    assert sample["tokens"].dtype == np.uint16
    assert sample["jpeg"] == b"\xff\xff"


def test_negative_indices_count_from_the_end(ds: penstock.Dataset) -> None:
    assert ds[-1]["label"] == NUM_SAMPLES - 1
    assert ds[-NUM_SAMPLES]["label"] == 0
    assert ds[[-1, 0]]["label"].tolist() == [NUM_SAMPLES - 1, 0]


@pytest.mark.parametrize("index", [NUM_SAMPLES, -NUM_SAMPLES - 1])
def test_an_index_out_of_range_ends_iteration_as_lists_do(ds: penstock.Dataset, index: int) -> None:
    with pytest.raises(IndexError, match="out of range for 100 samples"):
        ds[index]
    with pytest.raises(IndexError, match="out of range for 100 samples"):
        ds[[0, index]]


@pytest.mark.parametrize("index", [np.int32(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_anything_that_is_an_index_is_one(ds: penstock.Dataset, index: Any) -> None:
    assert ds[index]["label"] == 3


@pytest.mark.parametrize(
    "indices",
    [[5, 1, 1], (5, 1, 1), np.array([5, 1, 1]), np.array([5, 1, 1], np.uint8), torch.tensor([5, 1, 1])],
    ids=lambda indices: type(indices).__name__,
)
def test_several_indices_give_columns(ds: penstock.Dataset, indices: Any) -> None:
    found = ds[indices]
    assert found["label"].tolist() == [5, 1, 1]
    assert isinstance(found["tokens"], penstock.Ragged)
    assert [tokens.tolist() for tokens in found["tokens"]] == [[5] * 5, [1], [1]]
    assert found["large"].shape == (3, 5000)
    assert list(found["jpeg"]) == [b"\xff\xff", b"\xff", b"\xff"]


def test_a_list_of_one_index_gives_columns_too(ds: penstock.Dataset) -> None:
    for indices in ([7], np.array([7]), torch.tensor([7])):
        assert ds[indices]["label"].tolist() == [7]


def test_slices_give_columns(ds: penstock.Dataset) -> None:
    assert ds[10:20:3]["label"].tolist() == [10, 13, 16, 19]
    assert ds[-2:]["label"].tolist() == [98, 99]
    assert ds[::-40]["label"].tolist() == [99, 59, 19]
    assert ds[200:]["label"].tolist() == []


@pytest.mark.parametrize("indices", [[0.5], [[1, 2]], "label", None, ["1"]])
def test_what_is_no_index_is_a_type_error(ds: penstock.Dataset, indices: Any) -> None:
    with pytest.raises(TypeError, match="Indices must be a list of integers"):
        ds[indices]


def test_a_number_of_samples_to_take_is_answered_with_a_range(ds: penstock.Dataset) -> None:
    with pytest.raises(TypeError, match=r"The first 5 are range\(5\)"):
        ds.take(5)


@pytest.mark.parametrize(
    ("column", "wanted", "found"),
    [
        ("hash", [1, LARGE + 5], [0, 2]),
        ("hash", [-1, LARGE + 5], [2]),
        ("hash", [0.5, LARGE + 5], [2]),
        ("hash", float(LARGE), [1]),
        ("hash", 2**70, []),
        ("single", 0.1, [0]),
        ("single", [0.1, 0.5], [0, 2]),
        ("single", 1e39, []),
        ("single", float("inf"), [3]),
        ("double", 2**53 + 1, []),
        ("double", [2**53, 1], [0, 1]),
        ("flag", 1, [0, 2]),
        ("flag", 2, []),
        ("byte", [255, 256, -1], [2]),
        ("byte", [1.5, 2.0, float("nan")], [1]),
        ("byte", np.array([2, 255]), [1, 2]),
        ("byte", [], []),
    ],
)
def test_filter_compares_numbers_as_the_column_holds_them(column: str, wanted: Any, found: list[int]) -> None:
    ds = penstock.from_arrays(
        {
            "index": np.arange(4),
            "hash": np.array([1, LARGE, LARGE + 5, LARGE + 7], np.uint64),
            "single": np.array([0.1, 0.2, 0.5, np.inf], np.float32),
            "double": np.array([2.0**53, 1.0, -np.inf, np.nan]),
            "flag": np.array([True, False, True, False]),
            "byte": np.array([1, 2, 255, 0], np.uint8),
        }
    )
    assert ds.filter(**{column: wanted})[:]["index"].tolist() == found


def test_a_mask_is_answered_with_filter(ds: penstock.Dataset) -> None:
    mask = np.zeros(NUM_SAMPLES, bool)
    with pytest.raises(TypeError, match=r"bool of shape \[100\]. Use ds.filter\(mask\) for a mask"):
        ds[mask]


def test_iterating_gives_every_sample_in_order(ds: penstock.Dataset) -> None:
    assert [int(sample["label"]) for sample in ds] == list(range(NUM_SAMPLES))


def test_small_values_are_copies_and_large_ones_read_only_views(ds: penstock.Dataset) -> None:
    first, again = ds[3], ds[3]
    first["image"][:] = 77
    assert ds[3]["image"].max() == 3
    assert not first["large"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        first["large"][0] = 1
    assert not np.shares_memory(first["image"], again["image"])


def test_large_values_of_a_map_are_not_copied(folder: Path) -> None:
    ds = penstock.open(folder, io="map")
    assert np.shares_memory(ds[3]["large"], ds[3]["large"])


def test_what_read_gives_is_the_callers_own(ds: penstock.Dataset) -> None:
    found = ds.read([3, 4])
    found["label"][:] = 0
    found["tokens"].values[:] = 0
    assert ds.read([3])["label"].tolist() == [3]
    assert ds[3]["tokens"].tolist() == [3, 3, 3]


def test_lengths_come_from_ragged_columns_only(ds: penstock.Dataset) -> None:
    assert ds.lengths("tokens").tolist() == [number % 7 for number in range(NUM_SAMPLES)]
    assert ds.lengths("jpeg").tolist() == [number % 3 for number in range(NUM_SAMPLES)]
    with pytest.raises(SchemaError, match="'label' is int64: every sample has the same shape"):
        ds.lengths("label")
    with pytest.raises(SchemaError, match="No column 'x'"):
        ds.lengths("x")


def test_it_says_what_it_is(folder: Path) -> None:
    assert repr(penstock.open(folder)) == (
        f"Dataset({folder}: 100 samples; label: int64, image: uint8[4,4], large: float32[5000], "
        "tokens: uint16[*], jpeg: bytes)"
    )


def test_take_gives_these_samples_in_this_order(ds: penstock.Dataset) -> None:
    taken = ds.take([5, -1, 5, 0])
    assert len(taken) == 4
    assert [int(sample["label"]) for sample in taken] == [5, 99, 5, 0]
    assert taken[[-1, 1]]["label"].tolist() == [0, 99]
    assert taken.lengths("tokens").tolist() == [5, 1, 5, 0]
    assert taken.take([3, 1])[:]["label"].tolist() == [0, 99]
    assert len(ds.take([])) == 0
    with pytest.raises(IndexError, match="out of range for 4 samples"):
        taken[4]
    with pytest.raises(IndexError, match="out of range for 4 samples"):
        taken.read([-5])


@pytest.mark.parametrize("index", [NUM_SAMPLES, -NUM_SAMPLES - 1])
def test_take_refuses_what_is_not_there_at_once(ds: penstock.Dataset, index: int) -> None:
    with pytest.raises(IndexError, match=f"Index {index} is out of range for 100 samples"):
        ds.take([0, index])


def test_take_keeps_its_own_copy_of_the_indices(ds: penstock.Dataset) -> None:
    indices = np.array([1, 2, 3])
    taken = ds.take(indices)
    indices[:] = 0
    assert taken[:]["label"].tolist() == [1, 2, 3]
    assert pickle.loads(pickle.dumps(taken))[:]["label"].tolist() == [1, 2, 3]


def test_filter_keeps_the_samples_that_are_true(ds: penstock.Dataset) -> None:
    kept = ds.filter(ds.lengths("tokens") == 6)
    assert kept[:]["label"].tolist() == list(range(6, NUM_SAMPLES, 7))
    assert len(kept.filter(np.zeros(len(kept), bool))) == 0


@pytest.mark.parametrize("mask", [[True], [1] * NUM_SAMPLES, [[True]] * NUM_SAMPLES])
def test_a_mask_that_does_not_fit_is_refused(ds: penstock.Dataset, mask: Any) -> None:
    with pytest.raises(ValueError, match="The mask must be 100 bools; it is"):
        ds.filter(mask)


def test_a_function_is_answered_with_what_a_mask_is(ds: penstock.Dataset) -> None:
    with pytest.raises(TypeError, match="takes a mask, one bool per sample"):
        ds.filter(lambda sample: sample["label"] > 3)  # type: ignore[arg-type]


def test_a_columns_name_is_answered_with_how_to_read_a_column(ds: penstock.Dataset) -> None:
    with pytest.raises(TypeError, match=r"A whole column is ds\.select_columns\(\['\w+'\]\)\[:\]\['\w+'\]"):
        ds["label"]  # type: ignore[call-overload]


@settings(deadline=None, max_examples=60)
@given(
    num_samples=st.integers(0, 300),
    shares=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    seed=st.integers(-(2**70), 2**70),
)
def test_every_sample_is_in_exactly_one_part_of_a_split(num_samples: int, shares: list[int], seed: int) -> None:
    ds = penstock.from_arrays({"x": np.arange(num_samples)})
    fractions = {f"part{place}": share / sum(shares) for place, share in enumerate(shares)}
    parts = ds.split(fractions, seed=seed)
    assert list(parts) == list(fractions)
    found = np.concatenate([part[:]["x"] for part in parts.values()])
    assert np.bincount(found, minlength=num_samples).tolist() == [1] * num_samples
    assert all((np.diff(part[:]["x"]) > 0).all() for part in parts.values())


def test_a_part_that_is_not_there_is_answered_with_those_that_are() -> None:
    parts = penstock.from_arrays({"x": np.arange(9)}).split({"train": 0.9, "val": 0.1}, seed=1)
    with pytest.raises(KeyError, match=r"no part 'valid'. The parts are 'train', 'val'. Did you mean 'val'"):
        parts["valid"]
    assert parts.get("valid") is None


def test_the_parts_of_a_split_have_about_their_fractions() -> None:
    ds = penstock.from_arrays({"x": np.arange(200_000)})
    for seed in range(3):
        parts = ds.split({"train": 0.9, "val": 0.09, "test": 0.01}, seed=seed)
        for name, fraction in {"train": 0.9, "val": 0.09, "test": 0.01}.items():
            deviation = (200_000 * fraction * (1 - fraction)) ** 0.5
            assert abs(len(parts[name]) - 200_000 * fraction) < 5 * deviation


def test_appending_moves_no_sample_from_one_part_to_another(tmp_path: Path) -> None:
    write(tmp_path / "ds", 40)
    before = penstock.open(tmp_path / "ds").split({"train": 0.7, "val": 0.3}, seed=3)
    old = {name: part[:]["label"].tolist() for name, part in before.items()}
    with penstock.DatasetWriter(tmp_path / "ds", COLUMNS, mode="append") as writer:
        writer.write_batch(columns_of(60, start=40))
    after = penstock.open(tmp_path / "ds").split({"train": 0.7, "val": 0.3}, seed=3)
    for name, part in after.items():
        labels = part[:]["label"].tolist()
        assert labels[: len(old[name])] == old[name]
        assert all(label >= 40 for label in labels[len(old[name]) :])


def test_another_seed_gives_another_split_and_the_same_seed_the_same() -> None:
    ds = penstock.from_arrays({"x": np.arange(1000)})
    first, again, other = (ds.split({"a": 0.5, "b": 0.5}, seed=seed)["a"] for seed in (1, 1, 2))
    assert first[:]["x"].tolist() == again[:]["x"].tolist() != other[:]["x"].tolist()
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_split_never_changes() -> None:
    data, fractions = penstock.from_arrays({"x": np.arange(40)}), {"train": 0.8, "val": 0.2}
    assert data.split(fractions, seed=7)["val"][:]["x"].tolist() == [0, 1, 3, 8, 18]
    assert data.split(fractions, seed=7, by="x")["val"][:]["x"].tolist() == [0, 1, 3, 8, 18]
    assert data.split(fractions, seed=7, by="index")["val"][:]["x"].tolist() == [0, 5, 14, 20, 21, 22, 25, 34]


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({}, "must be positive"),
        ({"a": 0.0, "b": 1.0}, "must be positive"),
        ({"a": -0.5, "b": 1.5}, "must be positive"),
        ({"a": float("nan")}, "must be positive"),
        ({"a": 0.5}, "must add up to 1"),
        ({"a": 0.7, "b": 0.4}, "add up to 1.1"),
        ({"a": float("inf")}, "must add up to 1"),
    ],
)
def test_fractions_that_are_none_are_refused(fractions: Mapping[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        penstock.from_arrays({"x": np.arange(4)}).split(fractions, seed=0)


def test_fractions_without_names_and_seeds_that_are_no_int_are_refused() -> None:
    data = penstock.from_arrays({"x": np.arange(4)})
    with pytest.raises(TypeError, match="Fractions must have names"):
        data.split([0.5, 0.5], seed=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"split\(seed='1'\): the seed must be an int"):
        data.split({"a": 1.0}, seed="1")  # type: ignore[arg-type]


def test_columns_are_selected_in_the_order_asked_for(ds: penstock.Dataset) -> None:
    chosen = ds.select_columns(["jpeg", "label"])
    assert list(chosen[5]) == list(chosen[:2]) == ["jpeg", "label"]
    assert len(chosen) == NUM_SAMPLES
    assert list(chosen.take([1, 2]).select_columns(["label"])[0]) == ["label"]
    assert list(chosen.select_columns("label")[0]) == ["label"]
    with pytest.raises(SchemaError, match="No column 'image'; the columns are 'jpeg', 'label'"):
        chosen.select_columns(["image"])
    with pytest.raises(SchemaError, match="at least one column, each once"):
        ds.select_columns([])
    with pytest.raises(SchemaError, match="at least one column, each once"):
        ds.select_columns(["label", "label"])


def test_columns_that_are_not_selected_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "ds", 5)
    ds = penstock.open(tmp_path / "ds").select_columns(["label"])
    shard = next((tmp_path / "ds").glob("shard-*"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1  # the last column: jpeg or image
    shard.write_bytes(raw)
    assert ds[:]["label"].tolist() == [0, 1, 2, 3, 4]


def test_a_dataset_in_memory_keeps_its_classes_and_its_tokenizer(tmp_path: Path) -> None:
    known = {"classes": ["cat", "dog"], "tokenizer": {"name": "mine", "sha256": "abc"}, "skipped": {"null": 3}}
    with penstock.DatasetWriter(tmp_path / "ds", {"label": "int64"}, attributes=known) as writer:
        writer.write({"label": 1})
    stored = penstock.open(tmp_path / "ds")
    held = pickle.loads(pickle.dumps(stored.in_memory()))
    assert held.classes == stored.classes == ("cat", "dog")
    assert held.tokenizers == stored.tokenizers == {"abc": "mine"}
    assert held.fingerprint == penstock.from_arrays({"label": np.array([1])}).fingerprint


def test_a_dataset_in_memory_needs_no_file(tmp_path: Path) -> None:
    ds = penstock.open(write(tmp_path / "ds", 20)).take([7, 3]).in_memory()
    for file in (tmp_path / "ds").iterdir():
        file.unlink()
    assert [int(sample["label"]) for sample in ds] == [7, 3]
    assert ds.schema.to_json() == COLUMNS


def test_the_fingerprint_is_that_of_the_data_not_of_the_place(tmp_path: Path) -> None:
    first = penstock.open(write(tmp_path / "a", 10))
    same = penstock.open(write(tmp_path / "b", 10), io="pread", check="never")
    assert first.fingerprint == same.fingerprint
    assert first.fingerprint == penstock.open(write(tmp_path / "c", 10, attributes={"licence": "MIT"})).fingerprint


def test_the_fingerprint_changes_with_samples_columns_and_selection(tmp_path: Path) -> None:
    ds = penstock.open(write(tmp_path / "a", 10))
    parts = ds.split({"x": 0.5, "y": 0.5}, seed=0)
    renamed = dict(columns_of(10))
    renamed["caption"] = renamed.pop("jpeg")
    changed = columns_of(10)
    changed["label"] = changed["label"] + 1
    kinds = [
        ds,
        penstock.open(write(tmp_path / "b", 11)),
        ds.take([0, 1]),
        ds.take([1, 0]),
        ds.take([0]),
        ds.select_columns(["label"]),
        ds.select_columns(["label", "tokens"]),
        ds.select_columns(["tokens", "label"]),
        *parts.values(),
        ds.split({"x": 0.5, "y": 0.5}, seed=1)["x"],
        penstock.from_arrays(columns_of(10)),
        penstock.from_arrays(renamed),
        penstock.from_arrays(changed),
        penstock.from_arrays(columns_of(10)).take([0]),
    ]
    assert len({kind.fingerprint for kind in kinds}) == len(kinds)
    assert ds.select_columns(list(COLUMNS)).fingerprint == ds.fingerprint
    assert penstock.from_arrays(columns_of(10)).fingerprint == penstock.from_arrays(columns_of(10)).fingerprint


def test_a_dataset_pickles_as_path_and_fingerprint(folder: Path) -> None:
    ds = penstock.open(folder, io="pread", check="never")
    ds[:]
    raw = pickle.dumps(ds)
    assert len(raw) < 600
    assert all(part.encode() in raw for part in folder.parts)
    assert ds.storage.fingerprint.encode() in raw
    restored = pickle.loads(raw)
    assert repr(restored) == repr(ds)
    assert restored.fingerprint == ds.fingerprint
    assert restored.storage.io == "pread"
    assert restored.storage.check == "never"
    assert restored[:]["label"].tolist() == list(range(NUM_SAMPLES))


def test_parts_and_selected_columns_survive_a_pickle(folder: Path) -> None:
    part = penstock.open(folder).split({"a": 0.5, "b": 0.5}, seed=1)["a"].select_columns(["label"]).take([3, 1])
    restored = pickle.loads(pickle.dumps(part))
    assert len(pickle.dumps(penstock.open(folder).split({"a": 0.5, "b": 0.5}, seed=1)["a"])) < 600
    assert restored.fingerprint == part.fingerprint
    assert restored[:]["label"].tolist() == part[:]["label"].tolist()
    assert list(restored.schema) == ["label"]


def test_arrays_in_ram_are_pickled_whole() -> None:
    ds = penstock.from_arrays(columns_of(6))
    restored = pickle.loads(pickle.dumps(ds))
    assert restored.fingerprint == ds.fingerprint
    assert restored[:]["label"].tolist() == ds[:]["label"].tolist()


def test_unpickling_after_an_overwrite_is_refused(tmp_path: Path) -> None:
    raw = pickle.dumps(penstock.open(write(tmp_path / "ds", 10)))
    write(tmp_path / "ds", 11, mode="overwrite")
    with pytest.raises(DatasetChanged, match=r"rewritten after it was opened. Open it again"):
        pickle.loads(raw)
    write(tmp_path / "ds", 10, mode="overwrite")
    assert len(pickle.loads(raw)) == 10


def test_unpickling_where_nothing_is_says_so(tmp_path: Path) -> None:
    raw = pickle.dumps(penstock.open(write(tmp_path / "ds", 10)))
    (tmp_path / "ds").rename(tmp_path / "moved")
    with pytest.raises(IncompleteDataset, match="no dataset is there"):
        pickle.loads(raw)


@pytest.mark.parametrize("io", ["map", "pread"])
def test_a_reader_of_an_overwritten_dataset_gets_old_data_or_an_error(io: Any, tmp_path: Path) -> None:
    ds = penstock.open(write(tmp_path / "ds", 60), io=io)
    assert len(list((tmp_path / "ds").glob("shard-*"))) > 2
    ds[0]
    write(tmp_path / "ds", 33, mode="overwrite")
    assert ds[0]["label"] == 0  # its shard was open
    with pytest.raises(DatasetChanged, match="Open it again"):
        ds[59]
    with pytest.raises(DatasetChanged):
        ds[:]


@pytest.mark.parametrize("path", ["nothing", "empty", "file"])
def test_where_no_dataset_is_the_error_says_what_is(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises((IncompleteDataset, penstock.errors.FormatError), match=f"{path}: (no dataset|a file)"):
        penstock.open(tmp_path / path)


def test_a_path_may_be_text(folder: Path) -> None:
    assert len(penstock.open(str(folder))) == NUM_SAMPLES


@pytest.mark.parametrize("option", ["dtype", "shape", "column"])
def test_a_dataset_that_describes_itself_takes_no_description(option: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="describes itself"):
        penstock.open(folder, **{option: "x"})  # type: ignore[arg-type]


def test_lists_of_large_integers_are_not_rounded() -> None:
    large = LARGE + 5
    ds = penstock.from_arrays({"x": [1, large], "y": [[1, large], [2]], "z": [[1], [large]]})
    assert ds[1]["x"] == large
    assert ds[:]["z"].tolist() == [[1], [large]]
    assert ds[0]["y"].tolist() == [1, large]
    assert ds.map(lambda row: {"x": [1, large]}).batch(2).read(0)["x"].tolist() == [[1, large]] * 2
    with pytest.raises(SchemaError, match="object"):
        penstock.from_arrays({"x": [-1, large]})


def test_arrays_lists_and_byte_strings_become_columns() -> None:
    ds = penstock.from_arrays(
        {
            "a": np.arange(2, dtype=np.int8),
            "b": [[1, 2], [3, 4]],
            "c": [[1, 2], [3]],
            "d": [b"x", b""],
            "e": penstock.Ragged(np.zeros((3, 2), np.float32), np.array([0, 1, 3])),
            "f": np.zeros((2, 3), ml_dtypes.bfloat16),
            "g": np.array([[1, 2, 3], [4, 5, 6]], np.uint16)[:, ::2],
            "h": [1.5, 2.5],
            "i": torch.arange(2),
            "j": [[], [7]],
            "k": np.array([1, 2], ">i4"),
        }
    )
    assert ds.schema.to_json() == {
        "a": "int8",
        "b": "int64[2]",
        "c": "int64[*]",
        "d": "bytes",
        "e": "float32[*,2]",
        "f": "bfloat16[3]",
        "g": "uint16[2]",
        "h": "float64",
        "i": "int64",
        "j": "int64[*]",
        "k": "int32",
    }
    assert ds[1]["c"].tolist() == [3]
    assert ds.read([1])["g"].tolist() == [[4, 6]]
    assert ds[:]["k"].tolist() == [1, 2]
    assert ds[1]["e"].shape == (2, 2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "at least one column"),
        ({"a": np.arange(3), "b": np.arange(4)}, r"the same number of samples; these have \{'a': 3, 'b': 4\}"),
        ({"a": 5}, "'a' is a single value; a column has one per sample"),
        ({"a": np.array(["x"])}, "No shard can hold dtype"),
        ({"a": ["x", "yz"]}, "No shard can hold dtype"),
        ({"a": [{}, {}]}, "No shard can hold dtype"),
        ({"a": [None]}, "No shard can hold dtype"),
        ({"a": [1, [2]]}, "'a': this value cannot be converted to an array"),
        ({"a": [[1], [2, [3]]]}, "'a': this value cannot be converted to an array"),
        ({"a": [[1], [[2, 3]]]}, "does not fit"),
        ({"a.b": np.arange(3)}, "cannot name a column"),
        ({5: np.arange(3)}, "cannot name a column"),
        ({"a": penstock.Ragged(np.arange(3), np.array([0, 2]))}, "offsets must be non-decreasing"),
        ({"a": penstock.Ragged(np.arange(3), np.array([0, 2, 1, 3]))}, "offsets must be non-decreasing"),
    ],
)
def test_arrays_that_make_no_dataset_are_refused(arrays: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        penstock.from_arrays(arrays)


@pytest.mark.parametrize("context", [None, "fork", pytest.param("spawn", marks=pytest.mark.stress)])
def test_it_works_in_torchs_own_data_loader(context: str | None, folder: Path) -> None:
    ds = penstock.open(folder).select_columns(["label", "image", "large"])
    ds.read([0])  # opened before the workers start
    loader = torch.utils.data.DataLoader(
        ds,  # type: ignore[arg-type]
        batch_size=16,
        shuffle=True,
        num_workers=2 if context else 0,
        multiprocessing_context=context,
        generator=torch.Generator().manual_seed(0),
    )
    batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [16] * 6 + [4]
    labels = torch.cat([batch["label"] for batch in batches])
    assert torch.bincount(labels, minlength=NUM_SAMPLES).tolist() == [1] * NUM_SAMPLES
    assert labels.tolist() != sorted(labels.tolist())
    for batch in batches:
        assert torch.equal(batch["image"][:, 0, 0].long(), batch["label"])
        assert torch.equal(batch["large"][:, -1].long(), batch["label"])


def test_torch_asks_for_whole_batches_and_gets_samples(ds: penstock.Dataset) -> None:
    samples = ds.__getitems__([8, 3, 8])
    assert [int(sample["label"]) for sample in samples] == [8, 3, 8]
    assert [sample["jpeg"] for sample in samples] == [b"\xff\xff", b"", b"\xff\xff"]
    assert [sample["tokens"].tolist() for sample in samples] == [[8], [3, 3, 3], [8]]


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_importing_penstock_imports_nothing_heavy() -> None:
    assert run("""
        import sys, penstock
        print(sorted({"numpy", "torch", "pyarrow", "ray", "pandas", "ml_dtypes"} & set(sys.modules)))
    """) == "[]"  # fmt: skip


def test_opening_and_looking_at_samples_needs_neither_torch_nor_pyarrow(folder: Path) -> None:
    program = """
        import sys, penstock
        ds = penstock.open(sys.argv[1])
        ds[0], ds.lengths("tokens")
        print(sorted({"torch", "pyarrow", "ray"} & set(sys.modules)))
    """
    assert run(program, str(folder)) == "[]"


def test_reading_batches_needs_no_torch(folder: Path) -> None:
    program = """
        import sys, penstock
        print(penstock.open(sys.argv[1])[:3]["label"].tolist(), "torch" in sys.modules)
    """
    assert run(program, str(folder)) == "[0, 1, 2] False"


def test_every_public_name_arrives_when_asked_for() -> None:
    assert all(hasattr(penstock, name) for name in penstock.__all__)
    assert set(penstock.__all__) == set(dir(penstock))
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'nothing'"):
        _ = penstock.nothing
