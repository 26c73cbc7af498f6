"""Which training process this is: from torch.distributed, from torchrun, from Slurm, or from a device mesh.

Ranks of a mesh that differ only in tensor, context or pipeline parallelism share a batch.
"""

import math
import os

import torch.distributed as distributed
from torch.distributed.device_mesh import DeviceMesh

# Not SLURM_NTASKS: that is also set in a batch script that runs Python once, without srun.
_SOURCES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
_SPLIT = frozenset({"dp", "data", "data_parallel", "batch", "ddp", "fsdp", "hsdp", "replicate", "shard"})
_SPLIT |= {"dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep"}
"""Dimensions whose ranks get different rows, as torch's own and torchtitan's examples name them."""
_SHARED = frozenset({"tp", "tensor", "tensor_parallel", "sp", "sequence", "cp", "context", "context_parallel"})
_SHARED |= {"pp", "pipe", "pipeline", "pipeline_parallel", "mp", "model", "model_parallel"}
"""Dimensions whose ranks work on the same rows."""


def check_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Both, if they are valid.

    Raises:
        ValueError: there is no such rank.
    """
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank!r}, world_size={world_size!r}: expected a rank from 0 to world_size - 1.")
    return rank, world_size


def find_rank() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) when nothing says otherwise."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for names in _SOURCES:
        rank, world_size = (os.environ.get(name, "") for name in names)
        if rank and world_size:
            return _parse(*names, rank, world_size)
    return 0, 1


def find_data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(rank, number of ranks) of this process among those that get different rows.

    Raises:
        TypeError: it is not a mesh.
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


def _parse(rank_name: str, size_name: str, rank: str, world_size: str) -> tuple[int, int]:
    try:
        return check_rank(int(rank), int(world_size))
    except ValueError:  # a process that believes it is alone would read every rank's rows
        raise ValueError(
            f"{rank_name}={rank!r}, {size_name}={world_size!r} in the environment: expected a rank from 0 to the "
            "number of ranks - 1. Correct or unset them, or give rank= and world_size=."
        ) from None


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of its dimensions; a mesh with one dimension splits the data unless its name says otherwise."""
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return names or ("dp",)
    if names is None or not set(names) <= _SPLIT | _SHARED:
        found = "has no names" if names is None else f"has the dimensions {', '.join(map(repr, names))}"
        raise ValueError(
            f"mesh=...: the mesh {found}, which does not say whose ranks get different rows. Give that part of it "
            "alone, as in mesh['dp'], or rank= and world_size=."
        )
    return names
