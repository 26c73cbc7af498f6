"""What a loop over remote data will read, told to the process that fetches it.

    plan.uses: the shards of two epochs, and between which rows ── announce ──► fetcher
    the row that the loop has reached, four times a second          ── progress ──►

All ranks of the node are meant, so whoever fetches a shard fetches it for all, and none evicts what another needs.
A thread looks after it. Its failures cost time and no batch: readers ask for what is missing.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from penstock.errors import PenstockError, StorageError
from penstock.loader._pipeline import LoaderStatistics
from penstock.machine import ranks_on_node
from penstock.plan import Plan

if TYPE_CHECKING:
    from penstock.remote import RemoteFolder, Uses

_SECONDS = 0.25
_MOST_USES = 1 << 18
"""A schedule of so many takes 10 MB; it reaches less far where shards are read in many places."""
_PROBED_SHARE = 64
_SILENCE_SECONDS = 10.0
_SLACK_BATCHES = 4
"""How far other ranks may be behind."""

_log = logging.getLogger(__name__)


class FetchAhead:
    """Has the shards of one loop fetched before they are read, from `begin` on until it is closed.

    Args:
        num_ahead: Batches that are computed ahead.
    """

    @classmethod
    def of(cls, plan: Plan, **settings: Any) -> Self | None:
        """For a loop over a plan, with the other arguments; None if nothing of it is remote."""
        return cls(plan, **settings) if any(each.supply is not None for each in plan.shard_folders) else None

    def __init__(self, plan: Plan, *, row: int, end: int | None, rank: int, world_size: int, num_ahead: int) -> None:
        self._plan, self._end = plan, end
        self._ranks, self._world_size = _ranks_of_node(rank, world_size), world_size
        self._folders = [each for each in plan.shard_folders if each.supply is not None]
        self._supplies = tuple(cast("RemoteFolder", each.supply) for each in self._folders)
        self._slack = _SLACK_BATCHES * plan.global_size if len(self._ranks) > 1 else 0
        self._reach = self._slack + num_ahead * plan.global_size
        self._key, self.row = secrets.token_hex(8), row
        self._announced_at, self._has_warned = row, False
        self._horizon = self._find_horizon(row)
        self._is_over = threading.Event()
        self._show_first(self._announce())
        self._thread = threading.Thread(target=self._run, name="penstock-ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Fetch no more for this loop."""
        self._is_over.set()

    def count(self, statistics: LoaderStatistics) -> None:
        """Update what was fetched since this process opened remote data; as it was if the fetcher is gone."""
        found = self._supplies[0].read_counts()
        if found:
            statistics.fetched_bytes, statistics.num_fetched = int(found["num_bytes"]), int(found["num_files"])
            again = ("num_retries", "num_hedged", "num_damaged")
            statistics.num_fetched_again = sum(int(found[name]) for name in again)
            statistics.num_fetch_waits = int(found["num_waits"])
            statistics.fetch_wait_seconds = found["wait_seconds"]
            statistics.fetch_bytes_per_second = found["num_bytes"] / max(found["busy_seconds"], 1e-3)
            statistics.fetch_request_seconds = found["request_seconds"] / max(1, found["num_requests"])

    def _show_first(self, uses: Uses) -> None:
        """On a terminal, a bar until the shards of the first batch are there; readers wait for them in any case."""
        first = np.flatnonzero(uses.first_row < self.row + self._plan.global_size)
        missing = {}
        for folder, shard in zip(uses.folder[first].tolist(), uses.shard[first].tolist(), strict=True):
            entry = self._folders[folder].files[shard]
            path = self._supplies[folder].path / entry.name
            if not path.exists():
                missing[path] = entry.num_bytes
        if not missing or not sys.stderr.isatty():
            return
        from penstock.report import progress_bar

        total, before = sum(missing.values()), self._supplies[0].read_counts().get("num_bytes", 0.0)
        done, deadline = 0, time.monotonic() + _SILENCE_SECONDS
        with progress_bar("fetching the first shards") as show:
            while time.monotonic() < deadline and not all(path.exists() for path in missing):
                now = int(self._supplies[0].read_counts().get("num_bytes", 0.0) - before)
                if now > done:
                    done, deadline = now, time.monotonic() + _SILENCE_SECONDS
                show(min(done, total), total)
                time.sleep(_SECONDS / 2)

    def _run(self) -> None:
        told = -1
        while not self._is_over.wait(_SECONDS):
            try:
                row = self.row
                is_due = row >= self._announced_at + max(1, self._horizon // 4)
                if is_due or (row != told and not self._supplies[0].report_progress(self._key, row)):
                    self._announce()
                told = row
            except (PenstockError, OSError) as error:
                _log.warning("Remote data is not fetched ahead for now: %s", error)
        self._supplies[0].end_run(self._key)

    def _announce(self) -> Uses:
        row = self.row
        uses = self._uses(row, self._horizon)
        self._check_room(uses)
        until = uses.end if self._end is None else self._end
        self._supplies[0].announce(self._key, self._supplies, uses, row=row, until=until, slack=self._slack)
        self._announced_at = row
        return uses

    def _uses(self, row: int, num_rows: int) -> Uses:
        """What is read in the next rows, of folders that are remote."""
        size = self._plan.global_size
        end = row + max(size, num_rows)
        uses = self._plan.uses(row, end, ranks=self._ranks, world_size=self._world_size)
        folders = self._plan.shard_folders
        numbers = np.array([self._folders.index(each) if each in self._folders else -1 for each in folders], np.int64)
        renumbered = numbers[uses.folder]
        kept = renumbered >= 0
        arrays = {name: getattr(uses, name)[kept] for name in ("first_row", "last_row", "shard")}
        return replace(uses, folder=renumbered[kept], **arrays)

    def _find_horizon(self, row: int) -> int:
        """Rows that a schedule covers: two epochs, so that each shard's next use is known; less if that is long."""
        num_rows = self._plan.num_rows
        probed = max(self._plan.global_size, num_rows // _PROBED_SHARE)
        num_uses = max(1, len(self._uses(row, probed)))
        return max(probed, min(2 * num_rows, probed * _MOST_USES // num_uses))

    def _check_room(self, uses: Uses) -> None:
        """Refuse a cache that cannot hold what a batch reads, and warn of one that holds too little for those ahead.

        Raises:
            StorageError: names the bytes that would do.
        """
        from penstock.remote import most_in_use

        for number, folder in enumerate(self._folders):
            own, budget = uses.of_folder(number), self._supplies[number].where.budget_bytes
            sizes = np.array([shard.num_bytes for shard in folder.files], np.int64)
            needed = most_in_use(own, sizes, self._reach)
            if needed <= budget:
                continue
            said = (
                f"{folder.path}: this order needs {needed:,} bytes of shards for {self._reach:,} rows, and the cache "
                f"may have {budget:,}. Give cache_bytes={needed + needed // 8:,} or more; or shuffle with a smaller "
                'group= or with lanes=, and not with mode="full".'
            )
            if most_in_use(own, sizes, self._plan.global_size) > budget:
                raise StorageError(said)
            if not self._has_warned:
                self._has_warned = True
                _log.warning("%s Until then, shards are fetched more often than needed.", said)


def _ranks_of_node(rank: int, world_size: int) -> tuple[int, ...]:
    """The ranks that share this node's cache, as far as the environment says."""
    own = ranks_on_node()
    if own < 2 or world_size % own or os.environ.get("WORLD_SIZE", str(world_size)) != str(world_size):
        return (rank,)
    first = rank // own * own
    return tuple(range(first, first + own))
