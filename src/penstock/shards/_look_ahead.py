"""One background thread that checks blocks ahead of a reader who goes through shards in order.

Checking waits for memory, copying for its own writes. The bare copy and the bare checksums of 1 GB in two
threads on two idle cores took 1.1 times the copy alone; what a reader gets of it is what
`benchmarks/bench_read.py` prints. It costs no less processor time: where no core is idle nothing is won.

At most one stretch is in hand in the whole process: a second reader checks for itself, which scales
with the readers, where a queue would not. A process with one CPU never starts the thread.

# NOTE [nothing is lost ahead]
#   A stretch that is damaged or cannot be read stays unchecked, and that is all. The reader who comes to
#   it checks again, and raises there: the error names file and block, and comes only with their first use.
#   The flag of a block in a stretch's middle is left to that reader, so that it stops there and orders the next
#   stretch, long before it comes to the end of this one. At the end of a shard the next stretch is in the next.
#   A reader who comes early waits no longer than its own check would take, then checks for itself.

# NOTE [fork and exit]
#   The thread takes no lock, is ended before a fork and forgotten in the child, and is joined by the
#   interpreter at exit, after which `start` refuses. Its job holds the shard, so a map that is dropped
#   meanwhile stays until the job is done. It asks for the size of the file and faults the pages in as a
#   reader does, window by window; a file cut short in that moment is as bad for it as for a reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

_PATIENCE_SECONDS = 0.0003


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Blocks `first` to `last` of a tensor, in hand."""

    first: int
    last: int
    trip: int
    """The block that was checked and not flagged: who comes to it stops, and learns that all of them were."""
    length: int
    """How many blocks were asked for; the end of the tensor may have come before."""
    job: Future[bool]

    def overlaps(self, first: int, last: int) -> bool:
        """Whether any of the blocks `first` to `last` is among them."""
        return self.first < last and first < self.last

    def is_over_by_now(self) -> bool:
        """Whether they were checked as far as they can be; waits no longer than a reader takes for a window."""
        try:
            self.job.result(_PATIENCE_SECONDS)
        except TimeoutError:
            return False
        return True


class LookAhead:
    """The thread, started by the first job."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the thread (in a forked child)."""
        self._lock = threading.Lock()
        self.is_stopping = False
        """A job asks now and then, and ends when it is so."""
        self._executor: ThreadPoolExecutor | None = None
        self._job: Future[bool] | None = None

    def start(self, job: Callable[[], bool]) -> Future[bool] | None:
        """Run `job` in the background; None when the thread is busy, has no CPU of its own, or cannot be had."""
        with self._lock:
            if self._job is not None and not self._job.done():
                return None
            if self._executor is None:
                if len(os.sched_getaffinity(0)) < 2:
                    return None
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="penstock-look-ahead")
            try:
                self._job = self._executor.submit(job)
            except RuntimeError:  # no more threads, or the interpreter is shutting down
                return None
            return self._job

    def stop(self) -> None:
        """End the thread as soon as its job lets it; the next `start` makes another."""
        with self._lock:
            executor, self._executor = self._executor, None
            if executor is not None:
                self.is_stopping = True
                executor.shutdown()
                self.is_stopping = False


LOOK_AHEAD = LookAhead()

os.register_at_fork(before=LOOK_AHEAD.stop, after_in_child=LOOK_AHEAD.reset)
