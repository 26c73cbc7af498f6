"""Servers as users run them: `penstock serve` in a process of its own, that tests may kill, stop and start again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

import penstock


def written_plan(folder: Path, num_rows: int = 4096, row_values: int = 1024, batch: int = 128) -> Path:
    """A plan file over a dataset on disk: shuffled batches that differ from each other, of a quarter of a MiB."""
    rng = np.random.default_rng(0)
    with penstock.DatasetWriter(folder / "data", {"x": f"uint16[{row_values}]"}) as writer:
        for _ in range(num_rows):
            writer.write({"x": rng.integers(0, 65536, row_values, dtype=np.uint16)})
    plan = penstock.open(folder / "data").shuffle(seed=1).batch(batch)
    (folder / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
    return folder / "plan.toml"


class Addressed(Protocol):
    """A server, in this process or in one of its own."""

    @property
    def address(self) -> str: ...


class ServeProcess:
    """One `penstock serve`, on the same port each time it is started."""

    def __init__(self, plan: Path, *options: str) -> None:
        self._plan, self._options = plan, options
        self.address = "127.0.0.1:0"
        self.tls: ssl.SSLContext | None = None
        """What its clients need, if it speaks TLS."""
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Until it listens."""
        command = [sys.executable, "-m", "penstock.cli", "serve", os.fspath(self._plan), "--json", "--workers", "1"]
        self._process = subprocess.Popen(
            [*command, "--bind", self.address, *self._options], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = json.loads(self._process.stdout.readline())["address"]

    def send(self, number: signal.Signals) -> None:
        """Signal the server, and not its workers."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """`kill -9`, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def memory_mib(self) -> float:
        """The most memory that the process ever had."""
        return self._status("VmHWM") / 1024

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()


@contextlib.contextmanager
def serving(plan: Path, count: int, *options: str) -> Iterator[list[ServeProcess]]:
    """So many servers of a plan."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ServeProcess(plan, *options)) for _ in range(count)]
