"""Threads, the machine, its control groups and accelerators; and what is said where there are none."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from penstock.machine import ThreadMeter, _limits, _usage, available_memory, describe_machine
from penstock.machine._usage import Accelerators, AcceleratorUsage, machine_busy_seconds


def burn(seconds: float) -> None:
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        sum(range(1000))


def test_a_thread_is_told_its_own_time_and_not_that_of_others() -> None:
    with ThreadMeter() as meter:
        before = meter.read()
        other = threading.Thread(target=burn, args=(0.2,))
        other.start()
        other.join()
        after_other = meter.read()
        burn(0.05)
        after = meter.read()
    assert after_other.cpu_seconds - before.cpu_seconds < 0.1
    assert after.cpu_seconds - after_other.cpu_seconds >= 0.05


def test_new_pages_are_faults_of_the_thread_that_touches_them() -> None:
    with ThreadMeter() as meter:
        before = meter.read()
        memory = bytearray(8 << 20)
        assert meter.read().minor_faults > before.minor_faults
    assert len(memory)


def test_without_schedstat_the_delay_is_none_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "no", path)

    monkeypatch.setattr(os, "open", refuse)
    with ThreadMeter() as meter:
        usage = meter.read()
    assert usage.delay_seconds is None
    assert usage.cpu_seconds > 0


def test_a_meter_that_is_closed_twice_closes_one_file() -> None:
    meter = ThreadMeter()
    meter.close()
    meter.close()
    assert meter.read().delay_seconds is None


def test_the_machine_has_been_busy_for_at_least_as_long_as_this_process() -> None:
    busy = machine_busy_seconds()
    assert busy is not None
    assert busy > time.process_time() / 2


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe_machine()
    assert 1 <= facts.usable_processors <= facts.num_processors
    assert facts.processor
    assert facts.memory_bytes is not None
    assert (available_memory() or 0) < facts.memory_bytes


def test_without_proc_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_limits, _usage):
        monkeypatch.setattr(module, "_PROC", tmp_path)
    monkeypatch.setattr(_limits, "_OWN_CGROUPS", tmp_path / "no")
    assert machine_busy_seconds() is None
    assert available_memory() is None
    assert describe_machine().memory_bytes is None


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/job\n", {"memory.max": "max\n", "memory.current": "9\n", "job/memory.max": "800\n",
                       "job/memory.current": "500\n", "job/memory.stat": "anon 1\ninactive_file 200\n"}, (800, 300, 0)),
        ("0::/job\n", {"memory.max": "400\n", "memory.current": "300\n", "job/memory.max": "800\n",
                       "job/memory.current": "100\n"}, (400, 300, 0)),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "700\n",
                                  "memory/job/memory.usage_in_bytes": "90\n"}, (700, 90, 0)),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n",
                          "memory/memory.usage_in_bytes": "90\n"}, None),
        ("nonsense", {}, None),
    ],
)  # fmt: skip
def test_the_memory_that_control_groups_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    files: dict[str, str],
    expected: tuple[int, int, int] | None,
) -> None:
    monkeypatch.setattr(_limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(_limits, "_OWN_CGROUPS", tmp_path / "own")
    write(tmp_path, {"own": own, **files})
    assert _limits.memory_limit() == expected


def test_without_a_library_there_are_no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Accelerators() as accelerators:
        assert accelerators.read() == ()


def test_accelerators_are_read_through_nvml_and_what_a_device_does_not_tell_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(handle: str) -> None:
        raise RuntimeError("Not Supported")

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: f"handle {number}",
        nvmlDeviceGetName=lambda handle: b"H100" if handle == "handle 0" else "A100",
        nvmlDeviceGetUtilizationRates=lambda handle: refuse(handle) if handle[-1] == "1" else SimpleNamespace(gpu=37),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=5, total=80),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with Accelerators() as accelerators:
        assert accelerators.read() == (
            AcceleratorUsage(0, "H100", 0.37, 5, 80),
            AcceleratorUsage(1, "A100", None, 5, 80),
        )
    assert describe_machine().accelerators == ("H100", "A100")
