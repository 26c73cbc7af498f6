"""torch.distributed.checkpoint saves and loads where loaders stand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.integrations.checkpoint import RankState

from .frameworks import expected, packed

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: this is one process


def random_numbers() -> penstock.DataLoader[Any]:
    return penstock.DataLoader(torch.arange(40), batch_size=4, shuffle=True)


def planned() -> penstock.DataLoader[Any]:
    return penstock.DataLoader(packed(), num_workers=0)


@pytest.mark.parametrize(
    ("make", "state"), [(planned, lambda loader: loader), (planned, RankState), (random_numbers, RankState)]
)
def test_a_loader_goes_on_where_a_distributed_checkpoint_was_saved(
    tmp_path: Path, make: Callable[[], Any], state: Callable[[Any], Any]
) -> None:
    import torch.distributed.checkpoint as dcp

    loader = make()
    batches = iter(loader)
    for _ in itertools.islice(batches, 3):
        pass
    dcp.save({"data": state(loader), "weight": torch.ones(2)}, checkpoint_id=tmp_path)
    again = make()
    dcp.load({"data": state(again), "weight": torch.zeros(2)}, checkpoint_id=tmp_path)
    for batch, same in itertools.zip_longest(batches, again):
        torch.testing.assert_close(batch, same)


def test_a_plans_state_is_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    loader = planned()
    next(iter(loader))
    dcp.save({"data": loader}, checkpoint_id=tmp_path)
    for rank in range(2):
        again = penstock.DataLoader(packed(), rank=rank, world_size=2, num_workers=0)
        dcp.load({"data": again}, checkpoint_id=tmp_path)
        assert next(iter(again))["input_ids"].ravel().tolist() == expected(packed(), 2, rank, 2)[1]


def test_a_state_from_a_stranger_is_not_unpickled() -> None:
    import pickle

    state = RankState(random_numbers())
    with pytest.raises(pickle.UnpicklingError):
        state.load_state_dict({"rank_0": pickle.dumps({"version": print})})
