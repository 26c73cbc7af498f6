"""What the doctor does at each step is little: it looks for news, and reads the rest now and then."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.doctor import Recorder
from penstock.machine import EventKind, read_events


@pytest.mark.parametrize(("looks", "reading", "pause"), [(0, 0.02, 0.5), (20, 0.0, 0.5), (20, 0.02, 10.0)])
def test_after_its_first_looks_a_worker_looks_at_its_memory_as_rarely_as_it_takes_long(
    looks: int, reading: float, pause: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(1e9)

    def read_slowly() -> int:
        nonlocal now
        now += int(1e9 * reading)
        return 7

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    log = Recorder(tmp_path)
    log.num_memory_looks = looks
    log.look_at_memory(read_slowly)
    assert log.memory_due_at == now + 1e9 * pause
    (event,) = read_events(next(tmp_path.glob("*.events")))
    assert (event["kind"], event["value"]) == (EventKind.MEMORY, 7)
