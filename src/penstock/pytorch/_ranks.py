"""Which training process this is: from torch.distributed, from torchrun, or from Slurm."""

from __future__ import annotations

import os

import torch.distributed as distributed

# Not SLURM_NTASKS: that is also set in a batch script that runs Python once, without srun.
_SOURCES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))


def find_rank() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) when nothing says otherwise."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank, world_size in _SOURCES:
        if os.environ.get(rank, "").isdigit() and os.environ.get(world_size, "").isdigit():
            return int(os.environ[rank]), int(os.environ[world_size])
    return 0, 1
