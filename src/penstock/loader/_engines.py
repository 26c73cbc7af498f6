"""Which engine to make, and the one without workers, which all others must agree with."""

from __future__ import annotations

from typing import Any

from penstock.loader._elastic import ElasticEngine
from penstock.loader._engine import Engine, Result, WorkerKind
from penstock.loader._memory import SlotPool, private_slot
from penstock.loader._processes import ProcessEngine
from penstock.loader._threads import ThreadEngine
from penstock.loader._work import Computer, Work
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
