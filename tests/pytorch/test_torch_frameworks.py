"""Frameworks ask a loader what it is before they split it over processes; a plan is split already."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

import penstock
from pytorch.examples import expected, numbers, received
from pytorch.torch_examples import Numbers, plain

RANKS = """
import sys
sys.path.insert(0, sys.argv[1])
from accelerate import Accelerator
import penstock
from pytorch.examples import numbers, rows_of
from pytorch.torch_examples import Numbers

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
planned = accelerator.prepare(penstock.DataLoader(numbers(24).shuffle(seed=1).batch(8), num_workers=0))
dataset = accelerator.prepare(penstock.DataLoader(numbers(24), batch_size=4, shuffle=True, num_workers=0))
mapped = accelerator.prepare(penstock.DataLoader(Numbers(24), batch_size=4, shuffle=True))
mine = [rows_of(planned), rows_of(dataset), [n for batch in mapped for n in batch.tolist()]]
open(f"{sys.argv[2]}/rank-{accelerator.process_index}", "w").write(repr(mine))
"""


def test_accelerate_leaves_a_plans_loader_alone() -> None:
    loader = penstock.DataLoader(numbers(12).batch(4), num_workers=0)
    prepared = Accelerator(cpu=True).prepare(loader)
    assert prepared is loader
    assert received(prepared) == expected(numbers(12).batch(4))


def test_accelerate_makes_a_loader_of_its_own_from_one_of_a_torch_dataset() -> None:
    prepared = Accelerator(cpu=True).prepare(penstock.DataLoader(Numbers(6), batch_size=2, num_workers=1))
    assert plain(prepared) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.stress
def test_two_processes_of_accelerate_share_every_sample_once(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    tests = str(Path(__file__).parents[1])
    port = str(29500 + os.getpid() % 2000)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", port]
    subprocess.run([*command, tmp_path / "ranks.py", tests, tmp_path], check=True, timeout=110, capture_output=True)
    first, second = (eval((tmp_path / f"rank-{rank}").read_text()) for rank in range(2))
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(24))


def test_lightning_finds_nothing_to_inject_into_a_plans_loader() -> None:
    """What its `_requires_distributed_sampler` asks."""
    loader = penstock.DataLoader(numbers(12).batch(4), num_workers=0)
    assert isinstance(loader.sampler, DistributedSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert not isinstance(loader.dataset, IterableDataset)


def test_lightning_can_rebuild_a_loader_from_its_attributes_with_another_sampler() -> None:
    """What its `_get_dataloader_init_args_and_kwargs` does: attributes by name, unless they are defaults."""
    loader = penstock.DataLoader(Numbers(8), batch_size=2, shuffle=True, num_workers=1, drop_last=True, timeout=60)
    parameters = inspect.signature(type(loader)).parameters
    attributes = {name: value for name, value in vars(loader).items() if name in parameters}
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    changed = {name: value for name, value in attributes.items() if value != parameters[name].default}
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1, shuffle=False)
    again = type(loader)(**changed | {"sampler": sampler, "batch_sampler": None, "shuffle": False})
    assert plain(again) == [[1, 3], [5, 7]]
    assert {"batch_size", "num_workers", "drop_last", "timeout", "prefetch_factor"} <= set(changed)


def test_a_sampler_that_counts_epochs_tells_a_plans_loader() -> None:
    loader = penstock.DataLoader(numbers(12).shuffle(seed=1).batch(4), num_workers=0)
    loader.sampler.set_epoch(3)  # type: ignore[union-attr]
    assert received(loader) == expected(numbers(12).shuffle(seed=1).batch(4), epoch=3)
    assert torch.utils.data.get_worker_info() is None
