"""What a caller of `prepare` may choose, checked once.

Nothing here but `shard_bytes`, `shuffle` and `origins` decides a byte of the output: workers and engine
change the time it takes, the rest what happens when something is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import check_choice
from penstock.workers import usable_cpus

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
    """Processes at work at once; "auto" takes one per core this process may use."""
    engine: EngineName
    """"local" starts processes here, "ray" sends the same tasks to a cluster."""
    address: str | None
    """Ray cluster to use; None starts one on this machine, or joins the one this process already uses."""
    shard_bytes: int
    """Size a shard is closed at, and about the memory a worker takes; with `shuffle` about twice that."""
    shuffle: int | None
    """Seed that permutes all documents; costs a second pass over the output, and room for it on the disk."""
    pack: tuple[int, ...]
    """Row lengths whose counts are stored, so that opening a packed plan counts nothing."""
    on_error: OnError
    """What a bad row does: "raise" stops and names it, "skip" leaves it out and counts it."""
    max_skipped: int | None
    """More skipped rows than this stop the run; None sets no limit."""
    overwrite: bool
    """Whether a dataset, or a part of one, that was made in another way may be replaced."""
    origins: Origins
    """Where each sample's source row is kept: in the manifest, as runs; or as a column of 16 bytes a sample."""

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, get_args(EngineName))
        check_choice("on_error", self.on_error, get_args(OnError))
        check_choice("origins", self.origins, get_args(Origins))
        if self.workers != "auto" and (type(self.workers) is not int or self.workers < 1):
            raise ValueError(f"workers={self.workers!r}; a count from 1, or 'auto'.")
        if self.shard_bytes < 1:
            raise ValueError(f"shard_bytes={self.shard_bytes}; a shard has at least one byte.")
        if self.max_skipped is not None and (self.max_skipped < 0 or self.on_error != "skip"):
            raise ValueError(f"max_skipped={self.max_skipped} with on_error={self.on_error!r}; it limits 'skip'.")
        if self.address is not None and self.engine != "ray":
            raise ValueError(f"address={self.address!r} is the address of a Ray cluster; engine='ray' uses it.")
        if any(type(length) is not int or length < 1 for length in self.pack):
            raise ValueError(f"pack={list(self.pack)}; row lengths are counts of tokens, from 1.")
        if self.shuffle is not None and type(self.shuffle) is not int:
            raise ValueError(f"shuffle={self.shuffle!r}; a whole number to permute by, or None.")
        if self.origins == "manifest" and self.shuffle is not None:
            raise ValueError("shuffle= moves every sample, so where it came from is a column; leave origins= alone.")

    @property
    def num_workers(self) -> int:
        """Workers as a number."""
        return usable_cpus() if self.workers == "auto" else self.workers
