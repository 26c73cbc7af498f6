"""Functions that worker processes import by name."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.schema import Ragged


def lengths(batch: dict[str, Any]) -> dict[str, Any]:
    return {"length": np.array([len(text) for text in _texts(batch)], np.int64)}


def twice(batch: dict[str, Any]) -> dict[str, Any]:
    """Two samples for every row, and none for each third one."""
    texts = _texts(batch)
    places = [place for place in range(len(texts)) if place % 3 for _ in range(2)]
    return {"length": np.array([len(texts[place]) for place in places], np.int64), "__source__": np.array(places)}


def slowly(batch: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.05)
    return lengths(batch)


def suicidal(batch: dict[str, Any]) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def suicidal_once(batch: dict[str, Any]) -> dict[str, Any]:
    """Kills the first worker that comes by."""
    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return lengths(batch)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def stopped_once(batch: dict[str, Any]) -> dict[str, Any]:
    """Stops the first worker that comes by, until somebody lets it go on."""
    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    if not mark.exists():
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return lengths(batch)


def loses_its_connection(batch: dict[str, Any]) -> dict[str, Any]:
    raise ConnectionResetError("the user's own network")


def fails_on_several(batch: dict[str, Any]) -> dict[str, Any]:
    if len(_texts(batch)) > 1:
        raise LookupError("too many at once")
    return lengths(batch)


def keeps_the_gil(batch: dict[str, Any]) -> dict[str, Any]:
    """One call in C that takes minutes."""
    Path(os.environ["PENSTOCK_TEST_MARK"]).touch()
    sum(range(10**10))
    raise AssertionError


def is_pandas_there(batch: dict[str, Any]) -> dict[str, Any]:
    """Whether this process has imported pandas, in each row."""
    return {"is_there": np.full(len(batch["text"]), "pandas" in sys.modules)}


def with_origin(batch: dict[str, Any]) -> dict[str, Any]:
    return {"origin": lengths(batch)["length"]}


def ragged(batch: dict[str, Any]) -> dict[str, Any]:
    encoded = [text.encode() for text in _texts(batch)]
    offsets = np.cumsum([0, *map(len, encoded)])
    return {"tokens": Ragged(np.frombuffer(b"".join(encoded), np.uint8), offsets)}


def _texts(batch: dict[str, Any]) -> list[str]:
    return [str(text) for text in batch["text"]]


def environment(batch: dict[str, Any]) -> dict[str, Any]:
    """The environment that the worker was started with, in each row."""
    started_with = Path("/proc/self/environ").read_bytes().decode().split("\0")
    told = json.dumps(dict(variable.split("=", 1) for variable in started_with if variable))
    return {"environment": [told.encode()] * len(batch["text"])}
