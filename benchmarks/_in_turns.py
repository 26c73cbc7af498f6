"""Two scripts side by side in time: each runs while the other is stopped, a turn each, so that both see one machine.

Runs of their own, one after the other, differ by more than most changes gain as soon as other programs use the machine.
A stopped script's workers are stopped with it: nothing is prefetched meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.doctor import environment, read_recording, recording_folder
from penstock.machine import EventKind

_OBSERVE = {"seconds": math.inf, "steps": None, "full": True, "observe": True, "turn_seconds": 1.5, "doctor": None}
_WARM_SECONDS, _TURN_SECONDS, _SETTLE_SECONDS = 1.5, 3.0, 0.5
"""Sleeps go on while a script is stopped, so that its first steps afterwards are quick."""
_LONGEST_START = 60.0


class Runner:
    """A script with its workers, which runs or is stopped."""

    def __init__(self, script: Path, folder: Path, fix: dict[str, Any]) -> None:
        (folder / "settings.json").write_text(json.dumps(_OBSERVE))
        self._folder = folder
        self._windows: list[tuple[float, float]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(os.environ | {"FIX": json.dumps(fix)}, folder),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )

    def warm_up(self) -> None:
        """Let workers start and queues find their level, then stop."""
        end = time.monotonic() + _LONGEST_START
        while not len(self._steps()) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(_WARM_SECONDS)
        self._signal(signal.SIGSTOP)

    def take_turn(self) -> None:
        """Run for a while."""
        self._signal(signal.SIGCONT)
        begin = time.perf_counter_ns()
        time.sleep(_TURN_SECONDS)
        self._windows.append((begin + 1e9 * _SETTLE_SECONDS, time.perf_counter_ns()))
        self._signal(signal.SIGSTOP)

    def rates(self) -> list[float]:
        """Samples per second of each turn."""
        steps = self._steps()
        asked = [steps["value"][(steps["start"] > begin) & (steps["start"] < end)] for begin, end in self._windows]
        return [
            float(1e9 * rows.sum() / (end - begin)) for rows, (begin, end) in zip(asked, self._windows, strict=True)
        ]

    def close(self) -> None:
        """End it and all its workers."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _steps(self) -> Any:
        events = read_recording(self._folder).events
        return events[events["kind"] == EventKind.NEXT]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def compare(script: Path, fix: dict[str, Any], *, rounds: int) -> dict[str, float]:
    """The gain of a fix, and the standard error of its logarithm."""
    with _started(script, fix) as fixed, _started(script, {}) as plain:  # who reads all data into memory comes first
        for number in range(rounds):
            for runner in (plain, fixed) if number % 2 else (fixed, plain):
                runner.take_turn()
        pairs = list(zip(fixed.rates(), plain.rates(), strict=True))
    logs = [math.log(after / before) for after, before in pairs if after and before]  # a turn may see only a start
    return {"by_hand": math.exp(statistics.fmean(logs)), "error": statistics.stdev(logs) / math.sqrt(len(logs))}


@contextlib.contextmanager
def _started(script: Path, fix: dict[str, Any]) -> Iterator[Runner]:
    with recording_folder() as folder:
        runner = Runner(script, folder, fix)
        try:
            runner.warm_up()
            yield runner
        finally:
            runner.close()
