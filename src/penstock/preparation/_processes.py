"""One worker process as its parent sees it: how it is started, ended, and spoken of when it died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe

from penstock.preparation._stages import Keyed

_THREAD_SETTINGS = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# pyarrow's allocator gives memory back 10 ms after it was freed. A worker wants it again at the next batch, and pages
# that are new to a process cost as much as reading parquet into them: 2.2 s a GB when they are kept, 3.4 when not.
_MEMORY_SETTINGS = {"MIMALLOC_PURGE_DELAY": "-1"}
_STOP_SECONDS = 5.0


class WorkerProcess:
    """One process, and the task it is at."""

    def __init__(self, number: int, num_threads: int) -> None:
        self.name = f"worker {number}"
        self.number = number
        self.tasks: dict[str, Keyed] = {}
        """What it was given and has not finished; the last one is at work, one before it may be being synced."""
        self.connection, theirs = Pipe(duplex=True)
        lifeline, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(  # noqa: S603 our own interpreter and code
                [sys.executable, "-c", _start_code(theirs.fileno(), lifeline)],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **worker_settings(num_threads)},
            )
        except BaseException:
            os.close(self._lifeline)
            self.connection.close()
            raise
        finally:
            os.close(lifeline)
            theirs.close()

    def stop(self) -> int:
        """End the process, whatever it does, and return how it ended."""
        if not self.connection.closed:
            self.connection.close()
            os.close(self._lifeline)
            self.process.kill()
        return self.process.wait(_STOP_SECONDS)

    def ending(self) -> str:
        """How a process that closed its connection ended, in words."""
        try:
            code = self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        if code >= 0:
            return f"ended with code {code}"
        return f"was killed by {signal.Signals(-code).name}"


def _start_code(connection_descriptor: int, lifeline: int) -> str:
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from penstock.preparation._worker import main; "
        f"main({connection_descriptor}, {lifeline}, {os.getpid()})"
    )


def worker_settings(num_threads: int) -> dict[str, str]:
    """What libraries are told by the environment: how many threads are theirs, as workers are the parallelism here.

    What this process was told wins, but for the tokenizers library, whose own choice depends on how it was started.
    """
    defaults = {**_MEMORY_SETTINGS, **dict.fromkeys(_THREAD_SETTINGS, str(num_threads))}
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**chosen, "TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false"}


def explain_death(name: str, pid: int, how: str, doing: str, count: int) -> str:
    """Why a run stops after the deaths of workers, and what to do."""
    died = f"{name} (process {pid}) {how}"
    doing = f"while {doing}, the {count}. time. Finished tasks are kept:"
    if "SIGKILL" not in how:
        return f"{died} {doing} mend what its standard error tells, and run it again."
    return (
        f"{died} (out of memory?) {doing} run it again with fewer workers, or with a smaller shard_bytes after "
        f"--overwrite. System memory is {_memory_used()} used now."
    )


def _memory_used() -> str:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    total, free = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return f"{100 * (1 - free / total):.0f} %"
