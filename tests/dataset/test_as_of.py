"""Going on with a state after samples were appended: on the samples there were then, said in so many words."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from guarding import guarded
from penstock.errors import DatasetChanged, StateError
from penstock.loader import Cursor
from plan.examples import assert_same, make_documents
from shards.forging import manifest_of, put_manifest

DOCUMENTS = make_documents([5, 9, 3, 8, 2, 7, 4, 6, 1, 9])


def write(path: Path, first: int, last: int, mode: Any = "append") -> None:
    with penstock.DatasetWriter(path, {"tokens": "uint32[*]"}, shard_bytes=60, mode=mode) as writer:
        for document in DOCUMENTS[first:last]:
            writer.write({"tokens": document})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data", 0, 6, "create")
    return tmp_path / "data"


def plan(dataset: Any) -> Any:
    return dataset.shuffle(seed=7).pack(8).batch(2)


def test_a_state_goes_on_with_the_samples_there_were(folder: Path) -> None:
    before = plan(penstock.open(folder))
    state, rows = Cursor(before, 3).state(), [before.read_at(row) for row in range(8)]
    fingerprints = [penstock.open(folder).fingerprint, penstock.open(folder).storage.fingerprint]
    for first, last in ((6, 8), (8, 10)):  # twice: the state is of the first of three
        write(folder, first, last)
        with pytest.raises(
            StateError, match=r"data was .* If samples were appended since, penstock.open\(path, as_of=state\)"
        ):
            Cursor(plan(penstock.open(folder))).restore(state)
        for as_of in (state, *fingerprints):
            earlier = penstock.open(folder, as_of=as_of)
            assert len(earlier) == 6
            assert plan(earlier) == before
            assert Cursor(plan(earlier)).restore(state).row == 3
            for row, batch in enumerate(rows):
                assert_same(plan(earlier).read_at(row), batch)
    assert len(penstock.open(folder)) == 10
    assert (
        penstock.open(folder, as_of=penstock.open(folder).fingerprint).fingerprint == penstock.open(folder).fingerprint
    )


def split(datasets: Any) -> Any:
    return plan(datasets[0].split({"train": 0.7, "valid": 0.3}, seed=3)["train"])


def filtered(datasets: Any) -> Any:
    kept = datasets[0].lengths("tokens") > 2
    return datasets[0].filter(kept).shuffle(seed=1).batch(2)


def joined(datasets: Any) -> Any:
    return plan(penstock.concat(*datasets))


def joined_parts(datasets: Any) -> Any:
    return plan(penstock.concat(*(each.split({"a": 0.8, "b": 0.2}, seed=1)["a"] for each in datasets)))


def zipped(datasets: Any) -> Any:
    more = penstock.from_arrays({"n": np.arange(len(datasets[0]))})
    return datasets[0].zip(more).shuffle(seed=1).batch(2)


def unfolded(datasets: Any) -> Any:
    return datasets[0].unfold(2).shuffle(seed=1).batch(2)


def mixed(datasets: Any) -> Any:
    sources = {name: (each.shuffle(seed=2).pack(8), 1) for name, each in zip("ab", datasets, strict=True)}
    return penstock.mix(sources, seed=1, epoch="a", schedule={64: {"a": 1, "b": 3}}).batch(2)


def mixed_parts(datasets: Any) -> Any:
    parts = [split([each]).source.shuffle(seed=2).pack(8) for each in datasets]
    sources = {name: (part, 1) for name, part in zip("ab", parts, strict=True)}
    return penstock.mix(sources, seed=1, rows=20).take(rows=15).batch(2)


@pytest.mark.parametrize("build", [split, filtered, joined, joined_parts, zipped, unfolded, mixed, mixed_parts])
def test_a_state_opens_each_dataset_under_its_plan_as_it_was(build: Any, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("ab" if "joined" in build.__name__ or "mixed" in build.__name__ else "a")]
    for number, path in enumerate(paths):
        write(path, number, 6, "create")
    before = build([penstock.open(path) for path in paths])
    state, rows = Cursor(before, 3).state(), [before.read_at(row) for row in range(8)]
    assert len(json.dumps(state)) < 1024
    for last in (8, 10):
        for path in paths:
            write(path, last - 2, last)
        if build is not zipped:  # as many samples as before are needed
            now = [penstock.open(path) for path in paths]
            with pytest.raises(StateError, match=r"penstock.open\(path, as_of=state\)"):
                Cursor(build(now)).restore(state)
        again = build([penstock.open(path, as_of=json.loads(json.dumps(state))) for path in paths])
        assert again == before
        assert Cursor(again).restore(state).row == 3
        for row, batch in enumerate(rows):
            assert_same(again.read_at(row), batch)


def test_states_without_folders_still_fit(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        write(path, 0, 6, "create")
    plans = [build([penstock.open(path) for path in paths]) for build in (split, joined, mixed)]
    for each in plans:
        state = Cursor(each, 3).state()
        del state["folders"]
        assert Cursor(each).restore(state).row == 3
        with pytest.raises((ValueError, DatasetChanged), match=r"its first shards never had|not the state"):
            penstock.open(paths[0], as_of=state)
    assert "folders" not in Cursor(plan(penstock.open(paths[0]))).state()


def test_a_plan_over_one_folder_at_two_times_is_asked_which(folder: Path) -> None:
    before = penstock.open(folder).fingerprint
    write(folder, 6, 8)
    both = penstock.concat(penstock.open(folder, as_of=before), penstock.open(folder))
    state = Cursor(plan(both)).state()
    write(folder, 8, 10)
    with pytest.raises(ValueError, match="as it was at 2 times"):
        penstock.open(folder, as_of=state)
    assert [len(penstock.open(folder, as_of=each)) for each in state["folders"]] == [6, 8]


@pytest.mark.parametrize("folders", [5, "x" * 50, [5], {"a": 1}, [["a"]], None])
def test_a_state_whose_folders_make_no_sense_is_refused(folder: Path, folders: Any) -> None:
    with pytest.raises(ValueError, match="not the state of a plan over datasets"):
        penstock.open(folder, as_of={"folders": folders})


def test_pickles_and_plan_files_keep_what_was_meant(folder: Path, tmp_path: Path) -> None:
    fingerprint = penstock.open(folder).fingerprint
    write(folder, 6, 8)
    earlier = plan(penstock.open(folder, as_of=fingerprint))
    write(folder, 8, 10)
    assert len(pickle.loads(pickle.dumps(earlier)).source) == 6
    (tmp_path / "plan.toml").write_text(earlier.to_toml())
    again = penstock.load_plan(tmp_path / "plan.toml")
    assert again == earlier
    assert_same(again.read_at(1), earlier.read_at(1))


def test_what_was_not_only_appended_to_is_refused(folder: Path, tmp_path: Path) -> None:
    state = Cursor(plan(penstock.open(folder)), 3).state()
    write(folder, 1, 9, "overwrite")
    with pytest.raises(DatasetChanged, match="was not only appended to since"):
        penstock.open(folder, as_of=state)
    with pytest.raises(ValueError, match="not the state of a plan over datasets"):
        penstock.open(folder, as_of={"epoch": 1})
    (tmp_path / "x.bin").write_bytes(bytes(8))
    with pytest.raises(ValueError, match="as_of= is for dataset folders"):
        penstock.open(tmp_path / "x.bin", dtype="uint8", as_of="0" * 32)


def test_a_state_of_any_depth_is_refused(folder: Path) -> None:
    state: dict[str, Any] = {}
    for _ in range(100_000):
        state = {"facts": state}
    with pytest.raises(ValueError, match="not the state of a plan over datasets"):
        penstock.open(folder, as_of=state)


def test_what_was_there_is_looked_for_in_one_pass_over_the_shards(folder: Path) -> None:
    fields = manifest_of(folder)
    entry, before = fields["shards"][0], penstock.open(folder).fingerprint
    fields["shards"] += [entry | {"name": f"shard-{number:012d}-{number:016x}.safetensors"} for number in range(30_000)]
    fields["samples"] = sum(entry["samples"] for entry in fields["shards"])
    put_manifest(folder, fields)
    with guarded():
        assert len(penstock.open(folder, as_of=before)) == 6
        with pytest.raises(DatasetChanged, match="was not only appended to since"):
            penstock.open(folder, as_of="0" * 32)
