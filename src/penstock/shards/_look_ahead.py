"""One background thread that checks blocks ahead of a reader that goes through shards in order.

Checking waits for memory, copying for its own writes. The bare copy and the bare checksums of 1 GB in two threads on
two idle cores took 1.1 times as long as the copy alone; `benchmarks/bench_read.py` prints how much of that a reader
gains. It saves no CPU time: without an idle core nothing is gained.

At most one job runs in the whole process: a second reader checks for itself, which scales with the readers,
while a queue would not. A process with one CPU never starts the thread.

# NOTE [fork and exit]
#   The thread takes no lock, is ended before a fork and forgotten in the child, and is joined by the
#   interpreter at exit, after which `start` does nothing. Its job refers to the shard, so a map that is dropped
#   meanwhile stays until the job is done. Like a reader, it checks the size of the file and faults the pages in
#   window by window; a file truncated at that very moment is as bad for it as for a reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class LookAhead:
    """The thread, started by the first job."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the thread (in a forked child)."""
        self._lock = threading.Lock()
        self.is_stopping = False
        """Jobs check this now and then, and end when it is set."""
        self._executor: ThreadPoolExecutor | None = None
        self._job: Future[object] | None = None

    def start(self, job: Callable[[], object]) -> bool:
        """Run `job` in the background; False if the thread is busy, has no CPU of its own, or cannot be started."""
        with self._lock:
            if self._job is not None and not self._job.done():
                return False
            if self._executor is None:
                if len(os.sched_getaffinity(0)) < 2:
                    return False
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="penstock-look-ahead")
            try:
                self._job = self._executor.submit(job)
            except RuntimeError:  # no more threads, or the interpreter is shutting down
                return False
            return True

    def stop(self) -> None:
        """End the thread as soon as its job allows; the next `start` makes another."""
        with self._lock:
            executor, self._executor = self._executor, None
            if executor is not None:
                self.is_stopping = True
                executor.shutdown()
                self.is_stopping = False


LOOK_AHEAD = LookAhead()

os.register_at_fork(before=LOOK_AHEAD.stop, after_in_child=LOOK_AHEAD.reset)
