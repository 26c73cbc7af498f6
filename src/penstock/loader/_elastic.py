"""An engine that starts without workers and may get some later; items submitted before that are computed inline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.loader._engine import Engine, Result


class ElasticEngine:
    """Computes in the caller's thread until workers are wanted.

    Args:
        inline: Computes what is submitted until then.
        make_workers: Starts an engine with this many workers.
    """

    def __init__(self, inline: Engine, make_workers: Callable[[int], Engine]) -> None:
        self._inline, self._make_workers = inline, make_workers
        self._workers: Engine | None = None
        self._own: set[int] = set()
        """Tickets that are computed in the caller's thread."""

    @property
    def num_workers(self) -> int:
        """How many workers are wanted."""
        return 0 if self._workers is None else self._workers.num_workers

    def submit(self, ticket: int, item: Any, worker: int | None = None) -> None:
        """Have an item computed, by workers if there are any."""
        if self._workers is None:
            self._own.add(ticket)
            self._inline.submit(ticket, item)
        else:
            self._workers.submit(ticket, item, worker)

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        """The result of a ticket."""
        return self._engine_of(ticket).wait(ticket, seconds)

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """The first result; items submitted before there were workers come first."""
        if self._own or self._workers is None:
            ticket, result = self._inline.wait_any(seconds)
            self._own.discard(ticket)
            return ticket, result
        return self._workers.wait_any(seconds)

    def is_done(self, ticket: int) -> bool:
        """Whether the result is there."""
        return ticket not in self._own and self._workers is not None and self._workers.is_done(ticket)

    def forget(self) -> None:
        """Throw away everything submitted so far."""
        self._own.clear()
        for engine in self._engines():
            engine.forget()

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on; once there are some, at least one stays."""
        if self._workers is not None:
            self._workers.set_workers(max(1, num_workers))
        elif num_workers:
            self._workers = self._make_workers(num_workers)

    def num_started(self) -> int:
        """How many workers are computing."""
        return 0 if self._workers is None else self._workers.num_started()

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        counts = [engine.num_buffers() for engine in self._engines()]
        return sum(count for count, _ in counts), sum(used for _, used in counts)

    def close(self) -> None:
        """Stop the workers."""
        for engine in self._engines():
            engine.close()

    def _engine_of(self, ticket: int) -> Engine:
        if ticket in self._own:
            self._own.discard(ticket)
            return self._inline
        assert self._workers is not None
        return self._workers

    def _engines(self) -> list[Engine]:
        return [self._inline] if self._workers is None else [self._inline, self._workers]
