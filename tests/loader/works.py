"""Toy work for engines: what an item does is written in the item."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.loader import Arena


class Awkward(Exception):
    """Pickles, but cannot be made again from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Unpicklable(Exception):
    """Holds a lock."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Toy:
    """Needs nothing before it computes."""

    @staticmethod
    def warm_up() -> None:
        pass

    def announce(self, item: Any) -> None:
        pass


@dataclass(frozen=True)
class Square(Toy):
    """Squares numbers; tuples ask for trouble."""

    size: int = 4
    padding: bytes = field(default=b"", repr=False)

    def compute(self, item: Any, arena: Arena) -> dict[str, Any]:
        if isinstance(item, tuple):
            item = trouble(*item)
        out = arena.array((self.size,), np.dtype(np.int64))
        out[...] = item * item
        return {"square": out, "number": item}


_warmed_up: list[int] = []


class WarmedUp(Toy):
    """Says which processes warmed up before this one."""

    @staticmethod
    def warm_up() -> None:
        _warmed_up.append(os.getpid())

    def compute(self, item: Any, arena: Arena) -> dict[str, Any]:
        return {"before": list(_warmed_up), "worker": os.getpid()}


def trouble(kind: str, value: Any = 0) -> int:
    """Do something awful, or slow."""
    if kind == "raise":
        raise KeyError(f"no {value}")
    if kind == "awkward":
        raise Awkward(1, 2)
    if kind == "unpicklable":
        raise Unpicklable("held")
    if kind == "local":

        class Local(Exception):
            pass

        raise Local("from here")
    if kind == "connection":
        raise ConnectionResetError("the user's own network")
    if kind == "huge":
        raise ValueError("x" * (1 << 20))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "exit":
        os._exit(7)
    if kind == "kill once" and not os.path.exists(value):
        open(value, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sleep":
        time.sleep(value)
    if kind == "meet":  # as many threads as the barrier waits for
        value.wait(60)
    if kind == "spin":  # one C call that keeps the GIL
        sum(range(value))
    if kind == "fork" and os.fork() == 0:
        time.sleep(value)
        os._exit(0)
    return 3


class Returned(Toy):
    """Gives back whatever the item is, as a batch."""

    def compute(self, item: Any, arena: Arena) -> dict[str, Any]:
        return item() if callable(item) else dict(item)


def a_lambda() -> dict[str, Any]:
    return {"value": lambda: 0}


def odd_arrays() -> dict[str, Any]:
    """Arrays that shared memory does not hold, beside one that it does."""
    return {
        "text": np.array(["a", "bcd"]),
        "object": np.array([{}, None], dtype=object),
        "date": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "complex": np.array([1 + 2j]),
        "big_endian": np.array([1, 2], dtype=">i4"),
        "empty": np.empty((0, 5), np.float32),
        "scalar": np.array(7, np.int16),
        "strided": np.arange(10)[::3],
        "list": [1, 2],
    }


@dataclass
class Counting(Toy):
    """Keeps a count in the worker, so that it matters which one computes an item."""

    count: int = 0
    place: tuple[int, int] = (-1, -1)

    def begin(self, worker: int, num_workers: int) -> None:
        self.place = (worker, num_workers)

    def compute(self, item: Any, arena: Arena) -> dict[str, Any]:
        if isinstance(item, tuple):
            trouble(*item)
        self.count += 1
        return {"count": self.count, "place": self.place, "pid": os.getpid()}


class BadBeginning(Counting):
    """Cannot begin."""

    def begin(self, worker: int, num_workers: int) -> None:
        raise LookupError(f"worker {worker} has no shoes")
