"""Retry remote requests until one works or enough have failed, with growing pauses in between."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import PenstockError, StorageError
from penstock.sources._options import SourceOptions
from penstock.sources._urls import hide_queries

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 20.0
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, PenstockError)


def retry(url: str, options: SourceOptions, call: Callable[[], _Answer]) -> _Answer:
    """What `call` returns, tried up to `max_attempts` times with pauses that double.

    Raises:
        FileNotFoundError, PermissionError: at once; a retry would not help.
        StorageError: it never worked.
    """
    for attempt in range(1, options.max_attempts + 1):
        try:
            return call()
        except Exception as error:  # drivers raise whatever their HTTP libraries do: no common class
            if isinstance(error, _FINAL) and not _hides_a_failure(error):
                raise
            if not _is_transient(error) or attempt == options.max_attempts:
                raise _failure(url, error, attempt) from error
            _log.info("%s: attempt %d failed (%s), trying again", url, attempt, _describe(error))
        time.sleep(_pause_seconds(attempt))
    raise AssertionError("the last attempt returns or raises")


def _pause_seconds(attempt: int) -> float:
    # Random, or workers that failed together would come back together.
    longest = min(_FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1), _LONGEST_PAUSE_SECONDS)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def _is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: a client error stays one, a busy server does not stay busy."""
    status = getattr(error, "status", None)
    return not isinstance(status, int) or status >= 500 or status in (408, 425, 429)


def _hides_a_failure(error: Exception) -> bool:
    """Whether "not found" hides a failed connection, as in fsspec's HTTP driver."""
    cause = error.__cause__
    is_connection = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return isinstance(error, FileNotFoundError) and is_connection and _is_transient(cause)


def _failure(url: str, error: Exception, attempts: int) -> StorageError:
    tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    return StorageError(
        f"{url}: reading failed after {tries}; the last error was: {_describe(error)}. "
        "Check the address, the credentials and the network, then run again."
    )


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"no answer in time ({type(error).__name__})"
    text = hide_queries(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
