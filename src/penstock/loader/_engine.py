"""What all engines have in common, and which one to make."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

from penstock.loader._memory import Batch
from penstock.loader._work import Work

WorkerKind = Literal["inline", "thread", "process"]
StartMethod = Literal["forkserver", "spawn", "fork"]


class Result(NamedTuple):
    """A finished item."""

    batch: Batch
    worker: int
    produce_seconds: float
    cpu_seconds: float
    page_faults: int


class Engine(Protocol):
    """Computes items by ticket. Submit some, then wait for any of them in any order."""

    num_workers: int

    def submit(self, ticket: int, item: Any) -> None:
        """Have an item computed."""
        ...

    def wait(self, ticket: int) -> Result:
        """The result of a ticket, when it is there; raises what its computation raised."""
        ...

    def wait_any(self) -> tuple[int, Result]:
        """Whichever result is there first, with its ticket."""
        ...

    def is_done(self, ticket: int) -> bool:
        """Whether `wait` would return at once."""
        ...

    def forget(self) -> None:
        """Throw away everything submitted so far, without waiting for what is being computed."""
        ...

    def set_workers(self, num_workers: int) -> None:
        """Use more or fewer workers from now on."""
        ...

    def num_buffers(self) -> tuple[int, int]:
        """(buffers there are, buffers in use)."""
        ...

    def close(self) -> None:
        """Stop the workers, in bounded time. Twice is as good as once."""
        ...


def make_engine(work: Work, *, kind: WorkerKind, num_workers: int, start_method: StartMethod) -> Engine:
    """An engine of a kind, with its workers started."""
    if kind == "inline":
        from penstock.loader._inline import InlineEngine

        return InlineEngine(work)
    if kind == "thread":
        from penstock.loader._threads import ThreadEngine

        return ThreadEngine(work, num_workers)
    from penstock.loader._processes import ProcessEngine

    return ProcessEngine(work, num_workers, start_method)
