"""Jobs that are parallel in several ways: who gets which rows, and which places of them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock
from penstock.masks import context_slice
from penstock.pytorch._ranks import find_data_rank
from pytorch.examples import documents, numbers


@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_a_data_parallel_rank_get_the_same_batch(rank: int) -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for given in (mesh, mesh["dp"]):
            with penstock.DataLoader(numbers().batch(4), mesh=given, workers="inline") as loader:
                assert next(iter(loader))["x"].tolist() == [[0, 2], [1, 3]][rank // 2]
        with pytest.raises(ValueError, match="or mesh, or none"):
            penstock.DataLoader(numbers().batch(4), mesh=mesh, rank=0, world_size=2)
        with pytest.raises(ValueError, match=r"mesh=.* is for plans"):
            penstock.DataLoader(range(4), mesh=mesh)
        assert pickle.loads(pickle.dumps(loader)).mesh is None
    finally:
        distributed.destroy_process_group()


class PretendMesh(DeviceMesh):
    """A mesh without processes behind it."""

    def __init__(self, sizes: dict[str, int] | tuple[int, ...], coordinate: list[int] | None) -> None:
        self._sizes = list(sizes.values()) if isinstance(sizes, dict) else list(sizes)
        self._names = tuple(sizes) if isinstance(sizes, dict) else None
        self._coordinate = coordinate

    ndim = property(lambda self: len(self._sizes))
    mesh_dim_names = property(lambda self: self._names)

    def size(self, mesh_dim: int | None = None) -> int:
        assert mesh_dim is not None
        return self._sizes[mesh_dim]

    def get_coordinate(self) -> list[int] | None:  # type: ignore[override]
        return self._coordinate


@pytest.mark.parametrize(
    ("sizes", "coordinate", "expected"),
    [
        ({"dp": 4}, [3], (3, 4)),
        ({"workers": 4}, [3], (3, 4)),
        ((4,), [2], (2, 4)),
        ({"tp": 4}, [3], (0, 1)),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 4}, [1, 1, 2, 0, 3], (5, 6)),
    ],
)
def test_dimensions_of_a_mesh_split_or_share_rows(sizes: Any, coordinate: Any, expected: tuple[int, int]) -> None:
    assert find_data_rank(PretendMesh(sizes, coordinate)) == expected


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        (PretendMesh({"dp": 2, "ep": 2}, [0, 0]), ValueError, r"'dp', 'ep', which does not say .* mesh\['dp'\]"),
        (PretendMesh((2, 2), [0, 0]), ValueError, "has no names"),
        (PretendMesh({"dp": 2}, None), ValueError, "not in the mesh"),
        ((2, 2), TypeError, "torch's DeviceMesh is needed"),
    ],
)
def test_a_mesh_that_does_not_say_whose_rows_differ_is_refused(mesh: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        penstock.DataLoader(numbers().batch(4), mesh=mesh)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_slices_of_a_context_parallel_group_make_up_the_batch(layout: Any, size: int) -> None:
    with penstock.DataLoader(documents().shuffle(seed=1).pack(32).batch(4), workers="inline") as loader:
        batch = next(iter(loader))
    parts = [context_slice(batch, rank, size, layout=layout) for rank in range(size)]
    assert {part["input_ids"].shape for part in parts} == {(4, 32 // size)}
    assert sum(part["num_targets"] for part in parts) == batch["num_targets"]
    for key in ("input_ids", "labels", "position_ids", "document_ids"):
        if layout == "contiguous":
            whole = torch.cat([part[key] for part in parts], dim=1)
        else:
            halves = [part[key].chunk(2, dim=1) for part in parts]
            whole = torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim=1)
        assert torch.equal(whole, batch[key])
    assert all(part["cu_seqlens"] is batch["cu_seqlens"] for part in parts)


def test_slices_that_cannot_be_are_refused() -> None:
    batch = {"input_ids": torch.zeros(2, 12)}
    for rank, size, options, message in (
        (2, 2, {}, "expected a rank from 0 to size - 1"),
        (0, 4, {}, "12 tokens cannot be cut into 8 equal chunks"),
        (0, 2, {"layout": "ring"}, "'zigzag' and 'contiguous'"),
    ):
        with pytest.raises(ValueError, match=message):
            context_slice(batch, rank, size, **options)  # type: ignore[arg-type]
