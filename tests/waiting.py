"""Waiting for what another process or thread does: soon, but nobody knows when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(is_so: Callable[[], Any], seconds: float = 30.0) -> bool:
    """Whether it became so within that time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
