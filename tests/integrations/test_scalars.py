"""What a loader measures reaches the loggers people use."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.integrations.scalars import LoaderScalars, to_tensorboard

from .frameworks import packed


def test_scalars_are_means_since_they_were_last_taken() -> None:
    loader = penstock.DataLoader(packed(), num_workers=0)
    scalars = LoaderScalars(loader)
    assert scalars.take() == {}
    for _ in loader:
        pass
    taken = scalars.take()
    assert taken["data/wait_share"] == pytest.approx(
        taken["data/wait_seconds"] / (taken["data/wait_seconds"] + taken["data/step_seconds"])
    )
    assert taken["data/wait_seconds"] == pytest.approx(loader.stats().wait_seconds / loader.stats().num_batches)
    assert scalars.take() == {}


@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_a_watched_loop_writes_curves_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for _ in penstock.watch(penstock.DataLoader(packed(), num_workers=0), log=to_tensorboard(writer), log_every=2):
            pass
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "data/wait_share" in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("data/wait_seconds")] == [2, 4, 6]
