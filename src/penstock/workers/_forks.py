"""One hook for every fork: a child lets go of whatever belongs to the process that forked it.

A forked child has copies of the parent's channels, life-lines and queues. If it kept them, nobody would see the
parent's workers die, and workers would outlive their owner.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Abandonable(Protocol):
    """Something that belongs to the process that made it."""

    def abandon(self) -> None:
        """In a forked child: let go of it without ending it in the parent."""
        ...


_owned: weakref.WeakSet[Abandonable] = weakref.WeakSet()


def abandon_in_forks(owned: Abandonable) -> None:
    """Call `owned.abandon()` in every child that this process forks while `owned` lives."""
    _owned.add(owned)


def _abandon_all() -> None:
    for owned in list(_owned):
        owned.abandon()


os.register_at_fork(after_in_child=_abandon_all)
