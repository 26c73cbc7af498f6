"""Event records: written without locks, read after any death."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

from confined import run_confined
from penstock.machine import EventKind, EventWriter, no_events, read_events


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "a.events")
    writer.add(EventKind.SAMPLE, 1_000, 2_501_000, loader=3, trial=2, worker=1, sequence=7, cpu_seconds=0.5, value=-1)
    (event,) = read_events(tmp_path / "a.events")
    assert (event["kind"], event["loader"], event["trial"], event["worker"]) == (EventKind.SAMPLE, 3, 2, 1)
    assert (event["sequence"], event["start"], event["value"]) == (7, 1_000, -1)
    assert np.isclose(event["duration"], 0.0025)
    assert event["cpu"] == 0.5


def test_a_full_file_keeps_its_first_records(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "a.events", num_records=3)
    for number in range(5):
        writer.add(EventKind.NEXT, number + 1, number + 2, sequence=number)
    assert read_events(tmp_path / "a.events")["sequence"].tolist() == [0, 1, 2]


def test_a_disk_that_is_full_ends_the_record_and_not_the_process(tmp_path: Path) -> None:
    """A page of a map that finds no room is SIGBUS: also for who reads a hole, on a file system in memory."""
    script = """
import sys
from pathlib import Path
from penstock.machine import EventWriter, read_events
path = Path(sys.argv[1]) / "a.events"
writer = EventWriter(path)
for number in range(50_000):
    writer.add(1, number + 1, number + 2, sequence=number)
print(read_events(path)["sequence"].tolist() == list(range(len(read_events(path)))), len(read_events(path)) > 0)
"""
    done = run_confined([f"{tmp_path}={400 << 10}"], ["-c", script, str(tmp_path)])
    assert done.stdout == "True True\n", (done.returncode, done.stderr)


def test_threads_share_a_file_without_losing_a_record(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "a.events")

    def write(thread: int) -> None:
        for number in range(500):
            writer.add(EventKind.NEXT, 1, 2, loader=thread, sequence=number)

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(tmp_path / "a.events")
    for thread in range(4):
        assert sorted(events[events["loader"] == thread]["sequence"]) == list(range(500))


def test_what_a_killed_process_wrote_is_there(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        writer = EventWriter(tmp_path / "a.events")
        for number in range(100):
            writer.add(EventKind.FETCH, 1, 2, sequence=number)
        (tmp_path / "written").touch()
        time.sleep(60)
        os._exit(0)
    while not (tmp_path / "written").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(read_events(tmp_path / "a.events")) == 100


def test_no_events_have_the_fields_of_events(tmp_path: Path) -> None:
    EventWriter(tmp_path / "a.events", num_records=8)
    assert read_events(tmp_path / "a.events").dtype == no_events().dtype
    assert len(read_events(tmp_path / "a.events")) == 0
