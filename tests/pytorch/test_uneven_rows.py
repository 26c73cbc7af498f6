"""Uneven rows of mapped plans arrive the same from every engine, and a resumed run continues with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.plan import Plan
from penstock.schema import Ragged

pytestmark = pytest.mark.usefixtures("lasting_fork_servers")

ENGINES: list[dict[str, Any]] = [
    {"workers": "inline"},
    {"workers": "thread", "num_workers": 2},
    {"workers": "process", "num_workers": 1, "start_method": "forkserver"},  # each worker imports torch for `scene`
    {"workers": "process", "num_workers": 2, "start_method": "fork"},
]


def scene(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """An image of its own size, with objects in it."""
    count, height = int(rng.integers(0, 4)), int(rng.integers(1, 5))
    return {
        "tokens": row["tokens"],
        "image": np.full((height, height + 1, 3), row["x"], np.uint8),
        "caption": f"scene {int(row['x'])}",
        "raw": b"x" * count,
        "target": {"boxes": rng.random((count, 4)), "labels": torch.arange(count), "area": {"height": height}},
        "polygons": [rng.random((n + 1, 2)) for n in range(count)],
    }


def make_plan() -> Plan:
    lengths = np.arange(30) % 5
    tokens = Ragged.from_lengths(np.arange(lengths.sum()), lengths)
    data = penstock.from_arrays({"x": np.arange(30), "tokens": tokens})
    return data.shuffle(seed=3).map(scene, ragged=["target.boxes", "target.labels"]).batch(4)


def plain(value: Any) -> Any:
    """With types, and without arrays and tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, Ragged):
        return "Ragged", plain(value.values), plain(value.offsets)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with penstock.DataLoader(make_plan(), workers="inline") as loader:
        return [plain(batch) for batch in loader]


def test_a_batch_has_tensors_all_the_way_down(expected: list[Any]) -> None:
    batch = expected[0]
    assert batch["target"]["boxes"][0] == "Ragged"
    assert batch["target"]["area"]["height"][0] == "torch.int64"
    assert [dtype for dtype, _ in batch["image"]] == ["torch.uint8"] * 4
    assert batch["caption"][0].startswith("scene ")
    assert all(isinstance(one, bytes) for one in batch["raw"])


@pytest.mark.parametrize("engine", ENGINES, ids=["inline", "thread", "forkserver", "fork"])
def test_every_engine_gives_the_same_uneven_rows_and_resumes_among_them(
    engine: dict[str, Any], expected: list[Any]
) -> None:
    with penstock.DataLoader(make_plan(), **engine) as loader:
        batches = iter(loader)
        begun = [plain(next(batches)) for _ in range(3)]
        state = loader.state_dict()
    with penstock.DataLoader(make_plan(), **engine) as loader:
        loader.load_state_dict(state)
        assert begun + [plain(batch) for batch in loader] == expected


def test_uneven_rows_that_are_held_are_never_overwritten(expected: list[Any]) -> None:
    with penstock.DataLoader(make_plan(), workers="thread", num_workers=2) as loader:
        assert [plain(batch) for batch in list(loader)] == expected
