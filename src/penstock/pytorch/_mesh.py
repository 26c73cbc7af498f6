"""Which batch a rank of a device mesh gets: ranks that differ in tensor, context or pipeline parallelism share one."""

from __future__ import annotations

import math

from torch.distributed.device_mesh import DeviceMesh

_SPLIT = frozenset({"dp", "data", "data_parallel", "batch", "ddp", "fsdp", "hsdp", "replicate", "shard"})
_SPLIT |= {"dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep"}
"""Dimensions whose ranks get different rows, as torch's own and torchtitan's examples name them."""
_SHARED = frozenset({"tp", "tensor", "tensor_parallel", "sp", "sequence", "cp", "context", "context_parallel"})
_SHARED |= {"pp", "pipe", "pipeline", "pipeline_parallel", "mp", "model", "model_parallel"}
"""Dimensions whose ranks work on the same rows."""


def find_data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(rank, number of ranks) of this process among those that get different rows.

    Raises:
        TypeError: it is no mesh.
        ValueError: this process is not in it, or its dimensions do not say which of them split the data.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh={mesh!r}: torch's DeviceMesh is needed. With other frameworks give rank= and world_size=."
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("mesh=...: this process is not in the mesh, so it has no batch.")
    split = [number for number, name in enumerate(_names(mesh)) if name not in _SHARED]
    rank = 0
    for number in split:
        rank = rank * mesh.size(number) + coordinate[number]
    return rank, math.prod(mesh.size(number) for number in split)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Of its dimensions; a mesh of a single one splits the data whatever it is called, unless it says otherwise."""
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return names or ("dp",)
    if names is None or not set(names) <= _SPLIT | _SHARED:
        told = "has no names" if names is None else f"has the dimensions {', '.join(map(repr, names))}"
        raise ValueError(
            f"mesh=...: the mesh {told}, which does not say whose ranks get different rows. Give that part of it "
            "alone, as in mesh['dp'], or rank= and world_size=."
        )
    return names
