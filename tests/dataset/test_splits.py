"""A sample's part follows the sample, whatever is done to the data around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.dataset import _samples
from penstock.errors import SchemaError
from penstock.order import derive_key, share_ranges
from penstock.plan import Dataset
from penstock.splitmix import GAMMA, mix
from plan.examples import assert_same

FRACTIONS = {"train": 0.7, "val": 0.2, "test": 0.1}

samples_lists = st.lists(st.tuples(st.integers(0, 50), st.binary(max_size=3)), min_size=1, max_size=60)


def dataset(samples: list[tuple[int, bytes]]) -> Dataset:
    return penstock.from_arrays({"number": [number for number, _ in samples], "name": [name for _, name in samples]})


def parts_of(ds: Dataset, **arguments: Any) -> dict[tuple[int, bytes], str]:
    """The part of each sample by its content; equal ones must be in the same part."""
    found: dict[tuple[int, bytes], str] = {}
    for part, held in ds.split(FRACTIONS, seed=4, **arguments).items():
        for sample in held:
            assert found.setdefault((int(sample["number"]), bytes(sample["name"])), part) == part
    return found


@settings(deadline=None, max_examples=60)
@given(samples_lists, st.randoms(use_true_random=False), st.integers(0, 10))
def test_removing_adding_and_reordering_samples_moves_none_to_another_part(
    samples: list[tuple[int, bytes]], random: Any, num_removed: int
) -> None:
    before = parts_of(dataset(samples))
    others = [*samples[num_removed:], *((number + 100, b"new") for number in range(5))]
    random.shuffle(others)
    after = parts_of(dataset(others))
    assert {sample: after[sample] for sample in after if sample in before} == {
        sample: before[sample] for sample in before if sample in after
    }


@settings(deadline=None, max_examples=30)
@given(samples_lists, st.data())
def test_a_split_after_take_or_filter_agrees_with_one_before(samples: list[tuple[int, bytes]], data: Any) -> None:
    ds, before = dataset(samples), parts_of(dataset(samples))
    chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1))
    assert parts_of(ds.take(chosen)).items() <= before.items()
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples))))
    assert parts_of(ds.filter(mask)).items() <= before.items()


def test_a_split_does_not_depend_on_the_columns_that_are_shown() -> None:
    ds = dataset([(number, b"%d" % number) for number in range(200)])
    whole, shown = ds.split(FRACTIONS, seed=1), ds.select_columns(["number"]).split(FRACTIONS, seed=1)
    for part in FRACTIONS:
        assert whole[part][:]["number"].tolist() == shown[part][:]["number"].tolist()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=100))
def test_samples_of_one_group_are_in_one_part(users: list[int]) -> None:
    ds = penstock.from_arrays({"x": np.arange(len(users)), "user": np.array(users), "one": np.ones(len(users))})
    for by in ("user", ["user"], ["one", "user"]):
        parts = ds.split(FRACTIONS, seed=1, by=by)
        groups = [set(part[:]["user"].tolist()) for part in parts.values()]
        assert sum(map(len, groups)) == len(set(users))
        assert sorted(np.concatenate([part[:]["x"] for part in parts.values()])) == list(range(len(users)))


def test_a_label_that_is_renumbered_leaves_an_image_in_its_part() -> None:
    images = [bytes([number, number]) for number in range(100)]
    one = penstock.from_arrays({"image": images, "label": np.zeros(100, int)}).split(FRACTIONS, seed=1)
    two = penstock.from_arrays({"image": images, "label": np.ones(100, int)}).split(FRACTIONS, seed=1)
    for part in FRACTIONS:
        assert [each["image"] for each in one[part]] == [each["image"] for each in two[part]]


def test_a_word_that_is_also_a_column_must_be_told_apart() -> None:
    ds = penstock.from_arrays({"file": np.arange(50) % 5, "x": np.arange(50)})
    with pytest.raises(ValueError, match=r"split\(by='file'\): there is a column of that name, too. Write by=\['file'"):
        ds.split(FRACTIONS, seed=1, by="file")
    parts = ds.split(FRACTIONS, seed=1, by=["file"])
    assert sum(len(set(part[:]["file"].tolist())) for part in parts.values()) == 5


def test_what_a_split_cannot_go_by_is_an_error_at_once() -> None:
    ds = penstock.from_arrays({"x": np.arange(50)})
    with pytest.raises(SchemaError, match="No column 'user'; the columns are 'x'"):
        ds.split(FRACTIONS, seed=1, by="user")
    with pytest.raises(SchemaError, match="at least one column"):
        ds.split(FRACTIONS, seed=1, by=[])
    with pytest.raises(ValueError, match="The source file is known for 0 of 50 samples"):
        ds.split(FRACTIONS, seed=1, by="file")


def test_data_too_large_to_be_hashed_is_split_only_by_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_samples, "MAX_HASHED_BYTES", 100)
    ds = penstock.from_arrays({"x": np.arange(50)})
    with pytest.raises(ValueError, match=r"no hashes of samples are stored\. Prepare the data again"):
        ds.split(FRACTIONS, seed=1)
    for by in ("index", "x"):
        assert sum(map(len, ds.split(FRACTIONS, seed=1, by=by).values())) == 50


def test_all_parts_of_a_split_hash_the_data_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    hash_samples = _samples.hash_samples
    monkeypatch.setattr(_samples, "hash_samples", lambda columns: calls.append(1) or hash_samples(columns))
    parts = penstock.from_arrays({"x": np.arange(50)}).split(FRACTIONS, seed=1)
    assert sum(map(len, parts.values())) == 50
    assert len(calls) == 1


def test_large_data_is_hashed_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ds = penstock.from_arrays({"x": np.arange(1000), "name": [b"%d" % number for number in range(1000)]})
    whole = ds.split(FRACTIONS, seed=1)["train"][:]["x"].tolist()
    monkeypatch.setattr(_samples, "_CHUNK_BYTES", 100)
    ds = penstock.from_arrays({"x": np.arange(1000), "name": [b"%d" % number for number in range(1000)]})
    parts = ds.split(FRACTIONS, seed=1)["train"][:]["x"].tolist()
    assert parts == whole


def test_a_foreign_file_is_split_as_the_same_arrays_are(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 9, (300, 4))
    np.save(tmp_path / "rows.npy", rows)
    found = penstock.open(tmp_path / "rows.npy").split(FRACTIONS, seed=1)
    expected = penstock.from_arrays({"data": rows}).split(FRACTIONS, seed=1)
    for part in FRACTIONS:
        assert (found[part][:]["data"] == expected[part][:]["data"]).all()


@pytest.mark.parametrize(("first", "second"), [("content", "content"), ("content", ["tokens"]), ("user", "user")])
def test_a_part_is_not_split_again_by_the_seed_that_made_it(first: Any, second: Any) -> None:
    ds = penstock.from_arrays({"tokens": np.arange(1000), "user": np.arange(1000) // 2})
    train = ds.split({"train": 0.9, "test": 0.1}, seed=1, by=first)["train"].take(range(100, 600))
    with pytest.raises(ValueError, match=r"split\(seed=1\): these samples are already a part .* Use another seed\."):
        train.split({"train": 0.9, "val": 0.1}, seed=1, by=second)
    for options in ({"seed": 2, "by": second}, {"seed": 1, "by": "index"}):
        assert 20 < len(train.split({"train": 0.9, "val": 0.1}, **options)["val"]) < 100  # type: ignore[arg-type]


@given(st.integers(0, 5000), st.integers(0, 99), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_a_split_by_index_goes_by_a_number_drawn_for_each(count: int, seed: int, shares: list[int]) -> None:
    fractions = {str(number): share / sum(shares) for number, share in enumerate(shares)}
    parts = penstock.from_arrays({"x": np.arange(count)}).split(fractions, seed=seed, by="index")
    drawn = mix(np.arange(count, dtype=np.uint64) * GAMMA + np.uint64(derive_key(seed, "split"))) / 2.0**64
    for name, (begin, end) in share_ranges(fractions).items():
        expected = np.flatnonzero((drawn >= begin) & (drawn < end))
        assert parts[name][:]["x"].tolist() == expected.tolist()


def test_a_part_of_a_split_keeps_four_bytes_for_each_sample_and_reads_as_ever() -> None:
    tokens = [np.arange(n, dtype=np.uint16) for n in range(1, 200)]
    part = penstock.from_arrays({"tokens": tokens}).split({"a": 0.5, "b": 0.5}, seed=1, by="index")["a"]
    assert part.samples.chosen is not None
    assert part.samples.chosen.dtype == np.uint32
    again = part.split({"c": 0.5, "d": 0.5}, seed=2, by="index")["c"].take([3, 1])
    assert again.lengths("tokens").tolist() == [len(sample["tokens"]) for sample in again]
    taken = part.take(range(len(part)))
    for build in (lambda ds: ds.shuffle(1).pack(64), lambda ds: ds.window(16), lambda ds: ds.pad(), lambda ds: ds):
        one, other = (build(each).batch(4).read(1) for each in (part, taken))
        assert_same(one, other)


def test_what_take_chose_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data, hashed = penstock.from_arrays({"x": np.arange(1000), "y": np.arange(1000)}), []
    kept = data.filter(np.arange(1000) % 2 == 0)
    digest = _samples.digest
    monkeypatch.setattr(_samples, "digest", lambda content: hashed.append(len(content)) or digest(content))
    one = kept.shuffle(seed=1).batch(2)
    assert one.order_fingerprint != kept.select_columns("x").shuffle(seed=2).batch(2).order_fingerprint
    assert [size for size in hashed if size == 4000] == [4000]
