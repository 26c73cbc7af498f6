"""How errors and deaths of worker processes are told."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.machine import _limits
from penstock.workers import SentError, _failures, describe_death


class HoldsALock(Exception):
    """Cannot be pickled; its type can."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def pack(error: Exception) -> SentError:
    try:
        raise error
    except Exception as caught:
        return SentError.pack(caught)


def test_an_error_travels_with_its_class_and_traceback() -> None:
    back = pack(StorageError(28, "no room")).rebuild("in worker 1")
    assert isinstance(back, StorageError)
    assert (back.errno, back.strerror) == (28, "no room")
    assert back.__notes__ == ["in worker 1"]
    assert "raise error" in str(back.__cause__)


def test_an_error_that_cannot_be_pickled_keeps_its_type_and_message() -> None:
    back = pack(HoldsALock("held")).rebuild("in worker 1")
    assert type(back) is HoldsALock
    assert str(back) == "held"


def test_an_error_whose_type_cannot_travel_either_is_told_in_words() -> None:
    class Strange(Exception):
        pass

    back = pack(Strange("so odd")).rebuild("in worker 1")
    assert isinstance(back, RuntimeError)
    assert str(back) == "Strange: so odd"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            -signal.SIGKILL,
            r"was killed by SIGKILL while at it \(out of memory\?\)\. (System|The control group's) memory is",
        ),
        (-signal.SIGRTMIN - 1, r"was killed by signal \d+ while at it\. $"),
        (-signal.SIGSEGV, r"was killed by SIGSEGV while at it\. $"),
        (7, r"exited with code 7 while at it\. $"),
        (None, r"ended while at it\. (System|The control group's) memory is"),
    ],
)
def test_a_death_is_told_with_how_where_and_what_is_likely(code: int | None, told: str) -> None:
    assert re.match(rf"Worker 3 \(pid 8\) {told}", describe_death("Worker 3", 8, code, "at it"))


def test_deaths_of_the_same_kind_before_it_are_counted() -> None:
    told = describe_death("Worker 0", None, -signal.SIGKILL, "at it", num_before=2)
    assert told.startswith("Worker 0 was killed by SIGKILL while at it (out of memory?), like the 2 before it.")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GB, half of them used; the folder stands for /sys/fs/cgroup."""
    (tmp_path / "meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    monkeypatch.setattr(_failures, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(_limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(_limits, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path


VERSION_1 = {
    "memory/job/memory.limit_in_bytes": "8000000000",
    "memory/job/memory.usage_in_bytes": "7900000000",
    "memory/job/memory.stat": "cache 5\ntotal_inactive_file 100000000",
    "memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
}
VERSION_2 = {
    "job/memory.max": "8000000000",
    "job/memory.current": "7900000000",
    "job/memory.stat": "anon 5\ninactive_file 100000000",
    "job/memory.events": "oom 2\noom_kill 2",
    "job/step/memory.max": "max",
    "job/step/memory.current": "7000000000",
}


@pytest.mark.parametrize(
    ("own", "files", "told"),
    [
        ("0::/", {}, "System memory is 50 % used. "),
        (
            "4:memory:/job",
            VERSION_1,
            "The control group's memory is 98 % used (7.8 of 8.0 GB), and 2 of its processes ",
        ),
        ("0::/job/step", VERSION_2, "The control group's memory is 98 % used (7.8 of 8.0 GB), and 2 of its processes "),
        ("0::/job", {"job/memory.max": "40000000000", "job/memory.current": "4000000000"}, "System memory is 50 %"),
        ("0::/job/step", VERSION_2 | {"job/step/memory.max": "7500000000"}, "The control group's memory is 98 % used "),
    ],
    ids=["none", "version 1", "version 2", "not the fuller", "the outer one is fuller"],
)
def test_a_death_is_told_with_the_memory_of_the_control_group(
    machine: Path, own: str, files: dict[str, str], told: str
) -> None:
    for name, text in {"own": own, **files}.items():
        (machine / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / name).write_text(text + "\n")
    death = describe_death("Worker 0", 8, -signal.SIGKILL, "at it")
    assert death.startswith(f"Worker 0 (pid 8) was killed by SIGKILL while at it (out of memory?). {told}")
