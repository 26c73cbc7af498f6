"""Which training process this is: from torch.distributed, from torchrun, or from Slurm."""

from __future__ import annotations

import os

import torch.distributed as distributed

# Not SLURM_NTASKS: that is also set in a batch script that runs Python once, without srun.
_SOURCES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))


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


def _parse(rank_name: str, size_name: str, rank: str, world_size: str) -> tuple[int, int]:
    try:
        return check_rank(int(rank), int(world_size))
    except ValueError:  # a process that believes it is alone would read every rank's rows
        raise ValueError(
            f"{rank_name}={rank!r}, {size_name}={world_size!r} in the environment: expected a rank from 0 to the "
            "number of ranks - 1. Correct or unset them, or give rank= and world_size=."
        ) from None
