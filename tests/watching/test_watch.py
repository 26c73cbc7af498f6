"""A watched loader gives what the loader gives, and knows what each step took."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import penstock
from penstock.machine import _limits, _usage
from penstock.watching import WatchSummary

_WAIT = 0.02


class Slow:
    """Batches of which each comes late."""

    def __init__(self, length: int, seconds: float = _WAIT) -> None:
        self.length, self.seconds, self.epoch = length, seconds, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            time.sleep(self.seconds)
            yield number

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def summary_of(loader: Any, step_seconds: float = 0.0, **options: Any) -> WatchSummary:
    with penstock.watch(loader, sample_seconds=0.01, **options) as watched:
        for _ in watched:
            time.sleep(step_seconds)
        return watched.summary()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, penstock.DataLoader])
def test_batches_are_the_loaders(kind: Any, workers: int) -> None:
    rows = torch.arange(64)
    plain = [batch for (batch,) in kind(TensorDataset(rows), batch_size=8, num_workers=workers)]
    watched = penstock.watch(kind(TensorDataset(rows), batch_size=8, num_workers=workers))
    assert all(one.equal(other) for (one,), other in zip(watched, plain, strict=True))
    summary = watched.summary()
    watched.close()
    assert summary.num_steps == 8
    assert (summary.batches_ready is None) == (workers == 0 and kind is DataLoader)


def test_waiting_and_computing_are_told_apart() -> None:
    waiting, computing = summary_of(Slow(10)), summary_of(Slow(10, 0.0), step_seconds=_WAIT)
    assert waiting.wait_seconds >= _WAIT
    assert computing.step_seconds >= _WAIT
    assert waiting.wait_share > 0.5 > computing.wait_share
    assert "Training waits for data" in str(waiting)
    assert waiting.longest_waits[0][1] >= _WAIT
    assert waiting.typical_wait_seconds >= _WAIT * 0.9


def test_what_the_loader_offers_is_reached_through_the_watch() -> None:
    sampler = DistributedSampler(range(32), num_replicas=2, rank=0)
    loader = DataLoader(range(32), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    watched = penstock.watch(loader)
    assert len(watched) == len(loader)
    assert watched.batch_sampler is loader.batch_sampler
    assert watched.dataset is loader.dataset
    watched.sampler.set_epoch(3)
    assert sampler.epoch == 3
    watched.note = "kept"
    assert loader.note == "kept"  # type: ignore[attr-defined]
    assert not hasattr(watched, "no_such_name")
    other = penstock.watch(Slow(3))
    other.set_epoch(5)
    assert other.epoch == 5


def test_a_state_is_saved_and_loaded_through_the_watch() -> None:
    def make() -> Any:
        return penstock.watch(penstock.DataLoader(range(40), batch_size=4, shuffle=True))

    torch.manual_seed(3)
    watched = make()
    seen = [batch for _, batch in zip(range(3), watched, strict=False)]
    state = watched.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(seen) + len(rest) == 10
    assert torch.cat([*seen, *rest]).sort().values.equal(torch.arange(40))


@pytest.mark.parametrize("loader", [[1, 2, 3], range(3), (number for number in range(3)), {"a": 1}])
def test_anything_that_can_be_iterated_over_can_be_watched(loader: Any) -> None:
    expected = list(loader) if not isinstance(loader, Iterator) else [0, 1, 2]
    assert list(penstock.watch(loader)) == expected


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(TypeError, match="needs something to iterate over, not int"):
        penstock.watch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="watched already"):
        penstock.watch(penstock.watch([1]))
    with pytest.raises(ValueError, match="log_every=0 must be 1 or more"):
        penstock.watch([1], log_every=0)
    with pytest.raises(TypeError, match="len"):
        len(penstock.watch(number for number in range(3)))


def test_errors_of_the_loader_pass_and_what_was_measured_stays() -> None:
    def fails() -> Iterator[int]:
        yield from range(3)
        raise OSError("disk on fire")

    watched = penstock.watch(fails())
    with pytest.raises(OSError, match="disk on fire"):
        list(watched)
    assert watched.summary().num_steps == 3


def test_a_loop_that_is_left_early_counts_the_steps_that_ended() -> None:
    watched = penstock.watch(range(10))
    for number in watched:
        if number == 4:
            break
    assert watched.summary().num_steps == 4
    assert sum(1 for _ in watched) == 10
    summary = watched.summary()
    assert (summary.num_steps, summary.num_loops) == (14, 2)


def test_before_the_first_step_there_is_nothing_to_say(tmp_path: Path) -> None:
    watched = penstock.watch([1])
    assert str(watched.summary()) == "No step was completed, so there is nothing to say yet."
    assert "No step was completed" in watched.to_html(tmp_path / "page.html").read_text()
    assert json.loads(watched.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]


def test_pages_take_the_place_of_what_is_there_and_leave_its_other_names_alone(tmp_path: Path) -> None:
    page, precious = tmp_path / "page.html", tmp_path / "precious"
    precious.write_text("precious")
    page.hardlink_to(precious)
    watched = penstock.watch([1])
    for path in (watched.to_html(page), watched.to_perfetto(page)):
        assert path.read_text() != "precious"
    assert precious.read_text() == "precious"


def test_transfers_are_a_part_of_the_step() -> None:
    watched = penstock.watch(range(5))
    for _ in watched:
        with watched.transfer():
            time.sleep(0.004)
        with watched.transfer():
            time.sleep(0.004)
    summary = watched.summary()
    assert summary.transfer_seconds is not None
    assert 0.008 <= summary.transfer_seconds <= summary.step_seconds
    assert summary_of(range(5)).transfer_seconds is None


def test_scalars_go_to_any_logger_every_few_steps() -> None:
    logged: list[tuple[Mapping[str, float], int]] = []
    summary_of(Slow(10, 0.001), log=lambda scalars, step: logged.append((scalars, step)), log_every=4)
    assert [step for _, step in logged] == [4, 8]
    scalars = logged[-1][0]
    assert scalars["data/wait_seconds"] >= 0.001
    assert scalars["data/steps_per_second"] > 0
    assert 0 < scalars["data/wait_share"] <= 1
    assert all(math.isfinite(value) for value in scalars.values())
    assert "data/transfer_seconds" not in scalars  # nothing was measured


def test_the_time_of_workers_is_not_that_of_the_training_process() -> None:
    with penstock.watch(DataLoader(Burning(), batch_size=1, num_workers=2), sample_seconds=0.02) as watched:
        for _ in watched:
            pass
        summary = watched.summary()
    assert summary.worker_cores is not None
    assert summary.training_cores is not None
    assert summary.worker_cores > summary.training_cores
    assert summary.resident_bytes is not None
    assert summary.resident_bytes > 1e7


class Burning(torch.utils.data.Dataset[int]):
    """Samples that are nothing but computing."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        begin = time.process_time()
        while time.process_time() - begin < 0.03:
            pass
        return index


def test_batches_may_be_taken_in_another_thread() -> None:
    watched = penstock.watch(range(6))
    batches, taken = iter(watched), []
    taken.append(next(batches))
    thread = threading.Thread(target=lambda: taken.extend(batches))
    thread.start()
    thread.join()
    assert taken == list(range(6))
    assert watched.summary().num_steps == 6


def test_the_thread_that_looks_ends_with_the_watch() -> None:
    def lookers() -> int:
        return sum(thread.name == "penstock-sampler" for thread in threading.enumerate())

    gc.collect()
    before = lookers()
    with penstock.watch(range(3)) as watched:
        list(watched)
        assert lookers() == before + 1
    assert lookers() == before
    forgotten = penstock.watch(range(3))
    list(forgotten)
    del forgotten
    assert lookers() == before


def test_closing_a_watch_closes_a_loader_that_can_be_closed() -> None:
    loader = penstock.DataLoader(range(40), batch_size=4, num_workers=1, persistent_workers=True)
    with penstock.watch(loader) as watched:
        assert sum(1 for _ in watched) == 10
    assert loader._iterator is None


def test_without_schedstat_nothing_is_said_of_missing_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_usage, "_open_schedstat", lambda: None)
    summary = summary_of(Slow(4, 0.002))
    assert summary.no_core_seconds is None
    assert summary.training_thread_cores >= 0


def test_without_proc_the_steps_are_still_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_usage, "_PROC", str(tmp_path))
    monkeypatch.setattr(_limits, "_PROC", tmp_path)
    summary = summary_of(Slow(4))
    assert summary.num_steps == 4
    assert summary.wait_seconds >= _WAIT
    assert (summary.training_cores, summary.resident_bytes, summary.read_bytes_per_second) == (None, None, None)


def test_the_page_of_a_watched_run_tells_what_it_saw(tmp_path: Path) -> None:
    with penstock.watch(Uneven(), sample_seconds=0.01, name="train.py <b>") as watched:
        for _ in watched:
            time.sleep(0.001)
        text = watched.to_html(tmp_path / "page.html").read_text()
        trace = json.loads(watched.to_perfetto(tmp_path / "trace.json").read_text())
    assert "penstock watch · train.py &lt;b&gt;" in text
    assert "Training waits for data" in text
    assert "A few batches hold up all others" in text
    assert "penstock doctor" in text
    assert "Processors" in text
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 2 * 120


class Uneven:
    """One batch in forty takes long."""

    def __iter__(self) -> Iterator[int]:
        for number in range(120):
            time.sleep(0.06 if number % 40 == 20 else 0.0)
            yield number
