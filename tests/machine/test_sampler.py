"""A process and its children over time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.machine import ProcessUsage, Sampler, _usage, read_process

_BURN = "import time\nwhile time.process_time() < 0.5: pass"


def wait_for(sampler: Sampler, readings: int) -> None:
    deadline = time.monotonic() + 30
    while len(sampler.history().time_seconds) < readings:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_thread_samples_until_it_is_closed() -> None:
    with Sampler(interval_seconds=0.005, pss_every=2) as sampler:
        wait_for(sampler, 4)
    count = len(sampler.history().time_seconds)
    time.sleep(0.05)
    history = sampler.history()
    assert len(history.time_seconds) == count
    assert (np.diff(history.time_seconds) > 0).all()
    assert (history.rss_bytes > 0).all()
    assert np.isnan(history.pss_bytes[0])
    assert np.isfinite(history.pss_bytes[1])


def test_the_time_of_processes_that_have_ended_still_counts() -> None:
    sampler = Sampler(pss_every=0)
    with subprocess.Popen([sys.executable, "-c", _BURN + "\ninput()"], stdin=subprocess.PIPE) as process:
        while sampler.sample() and sampler.history().children_cpu_seconds[-1] < 0.3:
            time.sleep(0.02)
        process.communicate(b"\n")
    sampler.sample()
    history = sampler.history()
    assert history.num_processes[-1] < history.num_processes[-2]
    assert history.children_cpu_seconds[-1] >= 0.3


def test_another_process_is_sampled_until_it_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process, Sampler(process.pid, interval_seconds=0.005) as sampler:
        wait_for(sampler, 2)
        process.communicate(b"\n")
    assert not sampler.sample()
    assert len(sampler.history().time_seconds) >= 2


def test_memory_is_bounded_and_the_whole_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_usage, "_MOST_READINGS", 16)
    sampler = Sampler(pss_every=0, interval_seconds=1.0)
    sampler.sample()
    first = sampler.history().time_seconds[0]
    for _ in range(100):
        sampler.sample()
    times = sampler.history().time_seconds
    assert len(times) < 16
    assert times[0] == first
    assert sampler.interval_seconds >= 8


def test_pages_are_walked_through_as_rarely_as_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_slowly(pid: int, *, with_pss: bool) -> tuple[ProcessUsage, ...]:
        time.sleep(0.02 if with_pss else 0)
        usage = read_process(pid)
        assert usage is not None
        return (usage._replace(pss_bytes=1 if with_pss else None),)

    monkeypatch.setattr(_usage, "process_tree", read_slowly)
    sampler = Sampler(pss_every=2, interval_seconds=0.25)
    for _ in range(80):
        sampler.sample()
    walked = np.flatnonzero(np.isfinite(sampler.history().pss_bytes)).tolist()
    assert walked[0] == 1
    assert all(place >= 39 for place in walked[1:])  # 20 ms are 0.2 % of the time of 40 readings


def test_without_proc_there_is_nothing_to_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_usage, "_PROC", str(tmp_path))
    with Sampler() as sampler:
        assert not sampler.sample()
    assert sampler.history().time_seconds.shape == (0,)


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="interval_seconds=0 must be positive"):
        Sampler(interval_seconds=0)
