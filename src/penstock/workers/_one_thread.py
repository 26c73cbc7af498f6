"""One thread for each library in a worker: workers are many, and a forked one cannot use its parent's threads.

Libraries that are loaded later read how many threads they may use from the environment. Those that a fork brought
along are told: OpenMP's threads are not in the child, and a loop that is given to them waits for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_OPENMP = ("libgomp", "libomp", "libiomp")


def use_one_thread_each(environment: Mapping[str, str]) -> None:
    """In a forked worker: set the environment, and have every library that is loaded compute in the calling thread."""
    os.environ.update(environment)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):  # not one that is only half imported
        torch.set_num_threads(1)  # of the loaded libraries, MKL listens to this only
    for library in _loaded_openmp():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_set_num_threads(1)


def _loaded_openmp() -> set[str]:
    """Paths of the OpenMP libraries in this process: packages bring along their own."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    return {path for path in paths if Path(path).name.startswith(_OPENMP)}
