"""Which engine to make, the one without workers, which all others must agree with, and the one that gets them later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.loader._engine import Computer, Engine, Result, Work, WorkerKind
from penstock.loader._memory import SlotPool, private_slot
from penstock.loader._processes import ProcessEngine
from penstock.loader._threads import ThreadEngine
from penstock.workers import StartMethod


def make_engine(
    work: Work, *, kind: WorkerKind, num_workers: int, start_method: StartMethod, is_assigned: bool = False
) -> Engine:
    """An engine with its workers started; with `num_workers=0` it computes inline until it is given some.

    In an assigned engine, each item says which worker process computes it: for work that keeps something from
    one item to the next, so that no other worker can take over if that one dies.
    """
    if kind != "inline" and not num_workers:

        def make_workers(count: int) -> Engine:
            return make_engine(work, kind=kind, num_workers=count, start_method=start_method)

        return ElasticEngine(InlineEngine(work), make_workers)
    if kind == "process":
        return ProcessEngine(work, num_workers, start_method, is_assigned=is_assigned)
    if is_assigned:
        raise ValueError("Items can be assigned only to processes.")
    return InlineEngine(work) if kind == "inline" else ThreadEngine(work, num_workers)


class InlineEngine:
    """No workers: computes an item in the caller's thread when its result is requested."""

    num_workers = 0

    def __init__(self, work: Work) -> None:
        self._computer = Computer(work)
        self._items: dict[int, Any] = {}
        self._pool = SlotPool(private_slot)

    def submit(self, ticket: int, item: Any, worker: int | None = None) -> None:
        """Remember the item."""
        self._items[ticket] = item

    def wait(self, ticket: int, seconds: float | None = None) -> Result:
        """Compute the item now, however long it takes."""
        item = self._items.pop(ticket)
        slot = self._pool.take()
        try:
            computed = self._computer.compute(item, slot)
        except BaseException as error:
            self._pool.give_back(slot)
            error.add_note(f"while computing {item}")
            raise
        batches = self._pool.hand_over(slot, computed.layout)
        self._pool.shrink()
        return Result(batches, computed.layout.num_bytes, False, 0, *computed[1:])

    def wait_any(self, seconds: float | None = None) -> tuple[int, Result]:
        """Compute the oldest item."""
        ticket = min(self._items)
        return ticket, self.wait(ticket)

    def is_done(self, ticket: int) -> bool:
        """Never: nothing is computed ahead."""
        return False

    def forget(self) -> None:
        """Drop everything that was submitted."""
        self._items.clear()

    def set_workers(self, num_workers: int) -> None:
        """There are none."""

    def num_started(self) -> int:
        """There are none."""
        return 0

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        return self._pool.num_slots, self._pool.num_held

    def close(self) -> None:
        """Nothing runs."""
        self._items.clear()


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
