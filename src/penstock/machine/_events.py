"""Event records: what happened when, written by many processes and readable after any of them has died.

Each process maps its own file and appends fixed-size records to it. There are no locks between processes, threads take
slots by a counter, and the kernel keeps the pages whatever happens to the process. Adding a record takes about 1 µs
and, except for one in 4,096, no system call. Once a file or the disk is full, further records are dropped.
"""

import itertools
import mmap
import os
import struct
import threading
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_RECORD = struct.Struct("<HHHhqqffqq")
_FIELDS = [
    ("kind", "<u2"),
    ("loader", "<u2"),
    ("trial", "<u2"),
    ("worker", "<i2"),
    ("sequence", "<i8"),
    ("start", "<i8"),
    ("duration", "<f4"),
    ("cpu", "<f4"),
    ("value", "<i8"),
    ("extra", "<i8"),
]
_MOST_RECORDS, _PIECE_RECORDS = 1 << 18, 1 << 12


class EventKind(IntEnum):
    """What a record describes, and what its `value` and `extra` mean."""

    NEXT = 1
    """A training loop waited for a batch. Value: samples in it. CPU time: of its thread since the last one.
    Extra: run-queue delay since the last reading, in ns."""
    START = 2
    """An iterator was made: workers start. Value: batches of the epoch, or -1."""
    FETCH = 3
    """A batch was made, collating included. Value: samples in it. Extra: pages it waited for from disk."""
    SAMPLE = 4
    """A sample was read from the dataset. Value: its index, or -1."""
    COLLATE = 5
    """Samples were collated into a batch. Value: its bytes."""
    PICKLE = 6
    """A batch was packed for another process. Value: bytes of the message."""
    UNPICKLE = 7
    """A batch was unpacked."""
    IDLE = 8
    """A worker had nothing to do."""
    MEMORY = 9
    """A worker measured its memory. Value: bytes that it shares with no other process."""
    DELAY = 10
    """The thread that made a batch was ready to run, but had no core. Value: for how long, in ns."""


class EventWriter:
    """Adds records to this process's file, from any thread.

    Space is reserved piece by piece before it is written: touching a mapped page that the disk has no room for would
    kill the process with a signal. A full disk ends the record instead.
    """

    def __init__(self, path: Path, *, num_records: int = _MOST_RECORDS) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, num_records * _RECORD.size)
            self._map = mmap.mmap(descriptor, num_records * _RECORD.size)
        finally:
            os.close(descriptor)
        self._slots = itertools.count()
        self._num_reserved, self._end = 0, num_records
        self._reserving = threading.Lock()

    def add(
        self,
        kind: int,
        start_ns: int,
        end_ns: int,
        *,
        loader: int = 0,
        trial: int = 0,
        worker: int = -1,
        sequence: int = 0,
        cpu_seconds: float = 0.0,
        value: int = 0,
        extra: int = 0,
    ) -> None:
        """Write one record, on the clock of `time.perf_counter_ns`."""
        slot = next(self._slots)
        if slot < self._num_reserved or self._reserve(slot):
            _RECORD.pack_into(
                self._map,
                slot * _RECORD.size,
                kind,
                loader,
                trial,
                worker,
                sequence,
                start_ns,
                (end_ns - start_ns) / 1e9,
                cpu_seconds,
                value,
                extra,
            )

    def _reserve(self, slot: int) -> bool:
        """Reserve space for a record and those after it; False if the disk or the file is full."""
        with self._reserving:
            while self._num_reserved <= slot < self._end:
                count = min(_PIECE_RECORDS, self._end - self._num_reserved)
                try:
                    _keep_room(self._path, self._num_reserved * _RECORD.size, count * _RECORD.size)
                except OSError:
                    self._end = self._num_reserved
                else:
                    self._num_reserved += count
            return slot < self._num_reserved


def _keep_room(path: Path, begin: int, num_bytes: int) -> None:
    """Reopens the file: the script may close a descriptor that is kept, and its number become another file's."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, begin, num_bytes)
    finally:
        os.close(descriptor)


def read_events(path: Path) -> NDArray[np.void]:
    """The records of one file, in the order in which they were started, as a structured array.

    A process that was killed leaves at most one incomplete record per thread; it has no start, and is left out.
    """
    whole = path.stat().st_size // _RECORD.size
    if whole == 0:
        return no_events()
    records = np.fromfile(path, _FIELDS, whole)
    written = int(np.searchsorted(records["kind"] == 0, True)) if records["kind"][-1] == 0 else whole
    records = records[:written]
    whole_ones: NDArray[np.void] = records[(records["start"] > 0) & np.isfinite(records["duration"])]
    return whole_ones


def no_events() -> NDArray[np.void]:
    """An empty array of records."""
    return np.zeros(0, _FIELDS)
