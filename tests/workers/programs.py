"""Programs for worker processes: each message says what to do."""

from __future__ import annotations

import gc
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from penstock.workers import Channel, guard_life_line


@dataclass(frozen=True, slots=True)
class Echo:
    """Answers with what it was sent, and who it is; words ask for trouble."""

    word: str = "echo"

    def run(self, channel: Channel, life_line: int) -> None:
        guard_life_line(life_line)
        while True:
            message, descriptors = channel.receive()
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send((self.word, self.answer(message), os.getpid()))

    def answer(self, message: Any) -> Any:
        if message == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if message == "exit":
            os._exit(7)
        if message == "close all":
            os.closerange(3, 1 << 16)
        if message in ("sleep", "close all"):
            time.sleep(60)
        if message == "environment":
            return dict(os.environ)
        if message == "signals":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        if message == "garbage":
            return gc.isenabled(), gc.get_freeze_count() > 0
        if message == "group":
            return os.getpgid(0)
        return message


@dataclass(frozen=True, slots=True)
class Holding:
    """Holds a lock for as many seconds as it is told to."""

    lock: Any

    def run(self, channel: Channel, life_line: int) -> None:
        guard_life_line(life_line)
        while True:
            message, _ = channel.receive()
            if message != "begin":
                with self.lock:
                    time.sleep(message)
            channel.send(message)


class Unloadable:
    """Cannot be loaded in a worker."""

    def run(self, channel: Channel, life_line: int) -> None:
        raise AssertionError("never loaded")

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


def refuse() -> None:
    raise LookupError("no shoes")


class Faulty:
    """Fails in its own code."""

    def run(self, channel: Channel, life_line: int) -> None:
        raise ZeroDivisionError("a mistake of the program's")


def nothing() -> None:
    """A warm-up without anything to warm up."""
