"""How errors and deaths of worker processes are told."""

from __future__ import annotations

import re
import signal
import threading

import pytest

from penstock.errors import StorageError
from penstock.workers import PackedError, describe_death


class HoldsALock(Exception):
    """Cannot be pickled; its type can."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def pack(error: Exception) -> PackedError:
    try:
        raise error
    except Exception as caught:
        return PackedError.pack(caught)


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
        (-signal.SIGKILL, r"was killed by SIGKILL while at it \(out of memory\?\)\. System memory is"),
        (-signal.SIGRTMIN - 1, r"was killed by signal \d+ while at it\. "),
        (7, r"exited with code 7 while at it\. "),
        (None, r"ended while at it\. "),
    ],
)
def test_a_death_is_told_with_how_where_and_what_is_likely(code: int | None, told: str) -> None:
    assert re.match(rf"Worker 3 \(pid 8\) {told}", describe_death("Worker 3", 8, code, "at it"))


def test_deaths_of_the_same_kind_before_it_are_counted() -> None:
    told = describe_death("Worker 0", None, -signal.SIGKILL, "at it", num_before=2)
    assert told.startswith("Worker 0 was killed by SIGKILL while at it (out of memory?), as did the 2 before it.")
