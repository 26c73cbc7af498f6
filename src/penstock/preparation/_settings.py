"""What a caller of `prepare` may choose, checked once.

Only `shard_bytes`, `shuffle`, `limit` and `origins` affect the bytes of the output, and `pack` what is stored beside
it. Workers and engine decide how long it takes; the rest, what happens when something is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import check_choice
from penstock.machine import usable_cpus

EngineName = Literal["local", "ray"]
OnError = Literal["raise", "skip"]
Origins = Literal["auto", "manifest", "column"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a preparation runs.

    Raises:
        ValueError: a choice that does not exist, or a number out of range.
    """

    workers: int | Literal["auto"]
    """Number of worker processes; "auto" is one per core that this process may use."""
    engine: EngineName
    """"local" starts processes on this machine, "ray" sends the same tasks to a cluster."""
    address: str | None
    """Ray cluster to use; None uses the one that this process is connected to, or starts one on this machine."""
    shard_bytes: int
    """Size at which a shard is closed, and about the memory a worker needs; with `shuffle`, twice that."""
    shuffle: int | Literal["auto"] | None
    """Seed of a permutation of all documents; costs a second pass over the output, and disk space for it. "auto"
    permutes data that would come in runs of one class: class folders by reading their files in mixed order, which
    costs nothing, and large sources whose label column comes in runs by a second pass. None keeps the order of the
    sources."""
    pack: tuple[int, ...]
    """Row lengths to count packed rows for, so that a packed plan opens at once."""
    on_error: OnError
    """What to do about a bad row: "raise" stops and names it, "skip" leaves it out and counts it."""
    max_skipped: int | float | None
    """Most rows to skip: a number, or a share such as 0.5; None means a tenth, but always at least ten."""
    overwrite: bool
    """Whether to replace a dataset, or an unfinished one, that was made with different settings."""
    remove: bool
    """Whether to remove samples whose source files are no longer given; `overwrite` does so, too."""
    append: bool
    """Whether the sources are added to those that the dataset was made from, which are then left alone."""
    limit: int | None
    """Samples after which to stop, for a trial; None makes all of them."""
    origins: Origins
    """Where to keep the file and row of each sample: beside the manifest, or in a column, 16 bytes per sample."""

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, get_args(EngineName))
        check_choice("on_error", self.on_error, get_args(OnError))
        check_choice("origins", self.origins, get_args(Origins))
        if self.workers != "auto" and (type(self.workers) is not int or self.workers < 1):
            raise ValueError(f"workers={self.workers!r}; give a number of processes, or 'auto'.")
        if self.shard_bytes < 1:
            raise ValueError(f"shard_bytes={self.shard_bytes}; it must be at least 1.")
        self._check_max_skipped()
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise ValueError(f"limit={self.limit!r}; give a number of samples, at least 1, or None for all of them.")
        if self.append and (self.overwrite or self.remove):
            raise ValueError("append=True keeps every existing sample; it does not go with overwrite= or remove=.")
        if self.address is not None and self.engine != "ray":
            raise ValueError(f"address={self.address!r} is the address of a Ray cluster; it needs engine='ray'.")
        if any(type(length) is not int or length < 1 for length in self.pack):
            raise ValueError(f"pack={list(self.pack)}; row lengths must be numbers of tokens, at least 1.")
        if self.shuffle not in (None, "auto") and type(self.shuffle) is not int:
            raise ValueError(f"shuffle={self.shuffle!r}; give an integer seed, 'auto', or None.")
        if self.origins == "manifest" and type(self.shuffle) is int:
            raise ValueError("shuffle= moves every sample, so their origins must be a column; leave origins= out.")

    def _check_max_skipped(self) -> None:
        limit = self.max_skipped
        if limit is None:
            return
        if limit < 0 or (isinstance(limit, float) and not limit <= 1) or self.on_error != "skip":
            raise ValueError(
                f"max_skipped={limit} with on_error={self.on_error!r}; give a number of rows, or a share from 0.0 to "
                "1.0, with on_error='skip'."
            )

    @property
    def most_skipped_rows(self) -> int | None:
        """Rows after which to stop at once; None if the limit is a share, which is known only after the whole run."""
        return self.max_skipped if isinstance(self.max_skipped, int) else None

    @property
    def num_workers(self) -> int:
        """Workers as a number."""
        return usable_cpus() if self.workers == "auto" else self.workers
