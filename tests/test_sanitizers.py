"""The C library under the address and undefined-behaviour sanitizers: the tests of the rooms that use it find nothing.

The tests run in a process of their own, into which the sanitizer is loaded before Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.native import _build

ROOT = Path(__file__).parent.parent
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
TESTS = {
    "order": ["order/test_permutation.py", "order/test_orders.py", "order/test_mixture.py", "order/test_draw.py"],
    "packing": ["packing/test_pack.py"],
    "shards": [f"shards/test_{name}.py" for name in ("conversions", "reading", "roundtrip", "hashing", "corruption")],
    "forged": ["shards/test_foreign.py", "shards/test_tars.py"],
    "plan": [f"plan/test_{name}.py" for name in ("laws", "golden", "pack", "padded", "rows", "window")],
}


def runtime() -> str:
    """The sanitizer that must be loaded first; empty if the compiler has none."""
    if shutil.which("cc") is None:
        return ""
    command = ["cc", "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found if os.path.isabs(found) else ""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not (library := runtime()):
        pytest.skip("there is no compiler with sanitizers")
    folder = tmp_path_factory.mktemp("sanitized")
    _build.build(folder, SANITIZED)
    options = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}  # Python itself leaks
    return {**os.environ, **options, "PENSTOCK_KERNELS": str(folder / _build.LIBRARY)}


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("room", TESTS)
def test_the_tests_of_a_room_find_nothing(room: str, sanitized: dict[str, str]) -> None:
    paths = [str(ROOT / "tests" / path) for path in TESTS[room]]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, env=sanitized, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


@pytest.mark.stress
def test_the_sanitizer_would_be_heard(sanitized: dict[str, str]) -> None:
    read_beyond = """
import numpy as np
from penstock.shards import _kernels
table = np.array([[-1, 0, np.zeros(8, np.uint8).ctypes.data + 4096, 0, 0, 2, 0, 0]])
held, out = np.zeros(64, np.uint8), np.empty((1, 64), np.uint8)
table[0, 2] = held.ctypes.data + 8
_kernels.gather(table, np.array([0, 1]), 2, np.array([0]), 0, out, np.empty(0, np.uint8))
"""
    done = subprocess.run(
        [sys.executable, "-c", read_beyond], env=sanitized, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
