"""The one error of this room that `penstock.errors` does not have."""

from __future__ import annotations

from penstock.errors import PenstockError


class WorkerDied(PenstockError, RuntimeError):
    """Worker processes were killed or crashed, several times over the same work."""
