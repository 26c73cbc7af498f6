"""One epoch of one part: its records, and after every one of them a state to resume from.

A state is two counts and one mark: how many records were handed out, how many had been read by then, and where a
block begins from which every record not yet handed out can be read again. To resume, reading starts at that block;
records that were already handed out are skipped, and those that were in the shuffle buffer return to their slots.
Resuming decodes a block or two without a shuffle, and about ln(shuffle_buffer) times the buffer with one.

Records are handed out a list at a time by iterators written in C, which know how far they are: no Python code runs
per record, and no counter is kept.

The contents of the shuffle buffer can be computed, so no state holds them. It has `size` slots. Record number n goes
into slot n while slots are free. Then output j takes the record in slot `draw(j)`, and the next record read, number
size + j, takes its place. When no more records come, output j takes one of the slots left, and the last slot moves into
the gap. Draws depend only on the key and on j. So after `num_out` outputs, a slot holds the record that replaced the
last output drawn from it. Looking back finds the last draw of every slot within about size * ln(size) outputs, whatever
`num_out` is: 0.5 ms for a buffer of 1,000, 80 ms for 100,000.
"""

from __future__ import annotations

import collections
import itertools
import logging
import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DatasetChanged, FormatError
from penstock.order import derive_key
from penstock.sources._model import Rows, Split
from penstock.sources._splits import read_rows
from penstock.sources._stream_recipe import FileRange, Recipe, check_part, share_of, splits_of, start_state

Int64 = NDArray[np.int64]

_PER_STEP = 4  # numbers that Philox makes per value of its counter


class ShuffleBuffer:
    """Records waiting to be drawn, from the start or as they were after `num_out` outputs of `num_in` records."""

    def __init__(self, key: int, size: int, num_out: int, num_in: int) -> None:
        self.num_out, self.num_in = num_out, num_in
        self._key, self._size = key, size
        self._held = buffer_contents(key, size, num_out, num_in)
        self._records: list[Any] = [None] * len(self._held)
        self._slot_of = {record: slot for slot, record in enumerate(self._held.tolist())}

    @property
    def oldest(self) -> int:
        """Number of the oldest record not yet handed out."""
        return int(self._held.min()) if len(self._held) else self.num_in

    def take(self, first: int, values: list[Any]) -> list[Any]:
        """Take records, numbered from `first`, and return one for each that finds the buffer full.

        Those that were read before the resume return to their slots, if they still had one.
        """
        num_known = min(max(self.num_in - first, 0), len(values))
        for number in range(first, first + num_known):
            if (slot := self._slot_of.get(number)) is not None:
                self._records[slot] = values[number - first]
        values = values[num_known:]
        num_free = min(max(self._size - len(self._records), 0), len(values))
        self._records += values[:num_free]
        self._held = np.append(self._held, np.arange(self.num_in, self.num_in + num_free))
        self.num_in += num_free
        return self._exchange(values[num_free:])

    def drain(self) -> list[Any]:
        """Return the rest, when no more records come."""
        records, given = self._records, []
        for slot in draw_last_slots(self._key, self.num_out, len(records)):
            given.append(records[slot])
            records[slot] = records[-1]
            records.pop()
        return given

    def _exchange(self, values: list[Any]) -> list[Any]:
        records, given = self._records, []
        slots = draw_slots(self._key, self.num_out, len(values), self._size)
        for slot, value in zip(slots.tolist(), values, strict=True):
            given.append(records[slot])
            records[slot] = value
        np.maximum.at(self._held, slots, np.arange(self.num_in, self.num_in + len(values)))
        self.num_in += len(values)
        self.num_out += len(values)
        return given


def draw(key: int, first: int, num_draws: int) -> NDArray[np.uint64]:
    """Draws `first` to `first + num_draws`: 64 random bits each, the same however they are requested."""
    step, skip = divmod(first, _PER_STEP)
    bits: NDArray[np.uint64] = np.random.Philox(key=key, counter=step).random_raw(num_draws + skip)
    return bits[skip:]


def draw_slots(key: int, first: int, num_draws: int, size: int) -> Int64:
    """Slots of a full buffer that outputs `first` to `first + num_draws` take."""
    return (draw(key, first, num_draws) % np.uint64(size)).astype(np.int64)


def draw_last_slots(key: int, first: int, size: int) -> list[int]:
    """Slots that the last `size` outputs take, of a buffer that shrinks to nothing."""
    slots: list[int] = (draw(key, first, size) % np.arange(size, 0, -1, dtype=np.uint64)).tolist()
    return slots


def permutation(key: int, size: int) -> list[int]:
    """Numbers 0 to size - 1 in an order chosen by `key`."""
    order: list[int] = np.argsort(draw(key, 0, size), kind="stable").tolist()
    return order


def buffer_contents(key: int, size: int, num_out: int, num_in: int) -> Int64:
    """The record in each slot after `num_out` outputs of `num_in` records read."""
    num_exchanged = max(0, min(num_out, num_in - size))
    slots = _last_drawn(key, min(size, num_in), size, num_exchanged)
    for slot in draw_last_slots(key, num_exchanged, len(slots))[: num_out - num_exchanged]:
        slots[slot] = slots[-1]
        slots = slots[:-1]
    return slots


def _last_drawn(key: int, num_slots: int, size: int, num_outputs: int) -> Int64:
    """The record in each slot while records have only been exchanged."""
    found = np.full(num_slots, -1, np.int64)
    end = num_outputs
    while end > 0 and (found < 0).any():
        begin = max(0, end - 4 * size)
        latest = np.full(num_slots, -1, np.int64)
        np.maximum.at(latest, draw_slots(key, begin, end - begin, size), np.arange(begin, end) + size)
        found = np.where(found < 0, latest, found)
        end = begin
    return np.where(found < 0, np.arange(num_slots), found)


Record = dict[str, Any]

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 32 << 20
"""Chunks of this size are visited in shuffled order, because a buffer alone cannot mix distant records."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a block begins."""

    record: int
    """Records of the part before it."""
    skipped: int
    """Bad records of the part before it."""
    piece: int
    """Which of the part's file ranges; the name is the saved state's."""
    split: int
    place: int | None
    """Where `read_rows` starts; None for the start of the split."""


@dataclass(frozen=True, slots=True, eq=False)
class _Handout:
    """Records that are being handed out."""

    values: list[Record]
    iterator: Iterator[Record]
    first: int
    """Records of the part that were handed out before these."""
    num_read: int
    """Records of the part that are read before the last of these is handed out."""
    mark: _Mark
    """A block from which everything not yet handed out can be read again."""

    @property
    def num_out(self) -> int:
        """Records of the part that were handed out so far."""
        return self.first + len(self.values) - operator.length_hint(self.iterator)


class PartRun:
    """Records of part `part` of `num_parts` in one epoch, from its start or from a state.

    Iterate over it once. `state` is valid at any time between two records.

    Raises:
        StateError: the state is that of another part, or was saved with a different number of parts.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        part: int,
        num_parts: int,
        epoch: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        state = start_state(recipe, epoch) if state is None else state
        check_part(state, part, num_parts)
        self.epoch: int = state["epoch"]
        self._recipe = recipe
        self._part, self._num_parts = part, num_parts
        self._facts = {"version": state["version"], "facts": recipe.facts, "writing": state["writing"]}
        mark = _Mark(**state["from"])
        self._num_skipped = mark.skipped
        self._hand = _Handout([], iter([]), state["num_records"], state["num_read"], mark)
        self._is_stopped = False

    def state(self) -> dict[str, Any]:
        """Where the run is, as about half a KB of plain data: what was handed out, not what was read ahead."""
        num_out = self._hand.num_out
        return {
            **self._facts,
            "part": self._part,
            "num_parts": self._num_parts,
            "epoch": self.epoch,
            "num_records": num_out,
            "num_read": min(num_out + self._recipe.shuffle_buffer, self._hand.num_read),
            "num_skipped": self._num_skipped,
            "from": asdict(self._hand.mark),
        }

    def __iter__(self) -> Iterator[Record]:
        """The records that are left.

        Raises:
            FormatError: a bad record, after all good ones before it and unless they are skipped, or a damaged file.
            SchemaError: a file lacks a column.
            StorageError, DatasetChanged: a file is gone, or is not what it was.
        """
        return itertools.chain.from_iterable(self._hand_out())

    def stop(self) -> None:
        """Stop handing out records."""
        self._is_stopped = True
        collections.deque(self._hand.iterator, maxlen=0)

    def _hand_out(self) -> Iterator[Iterator[Record]]:
        num_out = self._hand.num_out
        for mark, values, num_read in self._shuffled() if self._recipe.shuffle_buffer else self._in_order():
            self._hand = _Handout(values, iter(values), num_out, num_read, mark)
            yield self._hand.iterator
            if self._is_stopped:
                return
            num_out += len(values)
        if self._num_skipped:
            _log.warning("Part %d: epoch %d skipped %d bad records.", self._part, self.epoch, self._num_skipped)

    def _in_order(self) -> Iterator[tuple[_Mark, list[Record], int]]:
        num_out = self._hand.num_out
        for mark, values in self._read(self._hand.mark):
            values = values[max(num_out - mark.record, 0) :]
            num_out += len(values)
            yield mark, values, num_out

    def _shuffled(self) -> Iterator[tuple[_Mark, list[Record], int]]:
        hand, size = self._hand, self._recipe.shuffle_buffer
        buffer = ShuffleBuffer(self._key("draws"), size, hand.num_out, hand.num_read)
        marks = collections.deque([hand.mark])
        for mark, values in self._read(hand.mark):
            marks.append(mark)
            while len(marks) > 1 and marks[1].record <= buffer.oldest:
                marks.popleft()
            yield marks[0], buffer.take(mark.record, values), buffer.num_in
        yield marks[0], buffer.drain(), buffer.num_in

    def _read(self, start: _Mark) -> Iterator[tuple[_Mark, list[Record]]]:
        """Blocks of the part from a mark on."""
        record, skipped, place = start.record, start.skipped, start.place
        num_expected = self._hand.num_read
        ranges = self._ranges()
        for piece in range(start.piece, len(ranges)):
            splits = self._splits(ranges[piece], piece)
            for split in range(start.split if piece == start.piece else 0, len(splits)):
                for rows in read_rows(splits[split], self._recipe.options, place):
                    mark = _Mark(record, skipped, piece, split, rows.place)
                    if rows.errors and self._recipe.on_error == "raise":
                        yield mark, rows.before_first_error()
                        raise _refusal(rows)
                    skipped += len(rows.errors)
                    self._count_bad(rows, skipped)
                    yield mark, rows.values
                    record += len(rows.values)
                place = None
        if record < num_expected:
            raise DatasetChanged(
                f"The files hold {record:,} records for this part, but {num_expected:,} had been read when the state "
                "was saved. They changed; start the epoch again, or restore them."
            )

    def _ranges(self) -> list[FileRange]:
        ranges = share_of(self._recipe.files, self._recipe.options, self._part, self._num_parts)
        return [ranges[number] for number in self._order(len(ranges), "pieces")]

    def _splits(self, own: FileRange, number: int) -> list[Split]:
        chunk_bytes = _CHUNK_BYTES if self._recipe.shuffle_buffer else None
        splits = splits_of(own, self._recipe.options, self._num_parts, chunk_bytes)
        return [splits[each] for each in self._order(len(splits), "splits", number)]

    def _order(self, size: int, *labels: int | str) -> list[int]:
        return permutation(self._key(*labels), size) if self._recipe.shuffle_buffer else list(range(size))

    def _key(self, *labels: int | str) -> int:
        return derive_key(self._recipe.seed, "stream", self.epoch, self._part, *labels)

    def _count_bad(self, rows: Rows, num_skipped: int) -> None:
        for error in rows.errors:
            _log.info("skipped: %s", error)
        self._num_skipped = num_skipped


def _refusal(rows: Rows) -> FormatError:
    first = min(rows.errors, key=lambda error: error.row)
    return FormatError(
        f"{first} (reason: {first.reason}). Repair or remove it, or skip bad records with on_error='skip', which can "
        "also resume from this stream's state."
    )
