"""One epoch of one part: its records, and after every one of them a state to resume from.

A state is counts and marks: how many records of a strand were handed out, how many had been read by then, where a
block begins from which every record not yet handed out can be read again, and where the latest block ends that was
read. To resume, reading starts at that block; records that were already handed out are skipped, and those that were in
the shuffle buffer return to their slots. Resuming decodes a block or two without a shuffle, and about
ln(shuffle_buffer) times the buffer with one.

Records are handed out a list at a time by iterators written in C, which know how far they are: no Python code runs
per record, and no counter is kept.
"""

from __future__ import annotations

import collections
import itertools
import logging
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import DatasetChanged, FormatError
from penstock.sources._model import Rows
from penstock.sources._splits import read_rows
from penstock.sources._stream_shares import Progress, Recipe, everything, strands_of_parts
from penstock.sources._stream_shuffle import ShuffleBuffer
from penstock.sources._stream_state import find_start, start_state, state_of

Record = dict[str, Any]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Handout:
    """Records that are being handed out."""

    values: list[Record]
    iterator: Iterator[Record]
    first: int
    """Records of the strand that were handed out before these."""
    num_read: int
    """Records of the strand that are read before the last of these is handed out."""
    mark: Progress
    """A block from which everything not yet handed out can be read again, and the latest block."""

    @classmethod
    def before(cls, progress: Progress) -> _Handout:
        """None, where a part stands."""
        return cls([], iter([]), progress.num_records, progress.num_read, progress)

    @property
    def num_out(self) -> int:
        """Records of the strand that were handed out so far."""
        return self.first + len(self.values) - operator.length_hint(self.iterator)


class PartRun:
    """Records of part `part` of `num_parts` in one epoch, from its start or from a state.

    Iterate over it once. `state` is valid at any time between two records.

    Raises:
        StateError: the state is of another number of parts, and not of all of them.
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
        self.epoch: int = state["epoch"]
        self._recipe, self._part, self._num_parts = recipe, part, num_parts
        self._writing = state["writing"]
        self._left, progress = find_start(state, recipe, part, num_parts)
        left = self._left or everything(recipe, num_parts)
        self._strands = strands_of_parts(recipe, left, num_parts, self.epoch)[part]
        self._strand = self._strands[progress.strand]
        self._hand = _Handout.before(self._strand.at(progress))
        self._num_skipped = self._hand.mark.num_skipped
        self._is_stopped = False

    def state(self) -> dict[str, Any]:
        """Where the run is, as about half a KB of plain data: what was handed out, not what was read ahead."""
        hand, num_out = self._hand, self._hand.num_out
        num_read = min(num_out + self._recipe.shuffle_buffer, hand.num_read)
        now = hand.mark._replace(num_records=num_out, num_read=num_read, num_skipped=self._num_skipped)
        return state_of(self._recipe, self._writing, self.epoch, self._num_parts, self._left, [now])

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
        for number in range(self._hand.mark.strand, len(self._strands)):
            if number > self._hand.mark.strand:
                self._strand = self._strands[number]
                self._hand = _Handout.before(self._strand.at(Progress(self._part, number)))
            num_out = self._hand.num_out
            for mark, values, num_read in self._shuffled() if self._recipe.shuffle_buffer else self._in_order():
                self._hand = _Handout(values, iter(values), num_out, num_read, mark)
                yield self._hand.iterator
                if self._is_stopped:
                    return
                num_out += len(values)
            if self._num_skipped:
                _log.warning("Part %d: epoch %d skipped %d bad records.", self._part, self.epoch, self._num_skipped)

    def _in_order(self) -> Iterator[tuple[Progress, list[Record], int]]:
        num_out = self._hand.num_out
        for mark, values in self._read(self._hand.mark):
            values = values[max(num_out - mark.record, 0) :]
            num_out += len(values)
            yield mark, values, num_out

    def _shuffled(self) -> Iterator[tuple[Progress, list[Record], int]]:
        hand, size = self._hand, self._recipe.shuffle_buffer
        buffer = ShuffleBuffer(self._strand.key("draws"), size, hand.num_out, hand.num_read)
        marks, latest = collections.deque([hand.mark]), hand.mark
        for mark, values in self._read(hand.mark):
            if mark.record + len(values) > hand.num_read:  # not one of those that are read again
                latest = mark
            marks.append(mark)
            while len(marks) > 1 and marks[1].record <= buffer.oldest:
                marks.popleft()
            yield _up_to(latest, marks[0]), buffer.take(mark.record, values), buffer.num_in
        yield _up_to(latest, marks[0]), buffer.drain(), buffer.num_in

    def _read(self, start: Progress) -> Iterator[tuple[Progress, list[Record]]]:
        """Blocks of the strand from a mark on."""
        record, skipped, place = start.record, start.skipped, start.place
        num_expected = self._hand.num_read
        for piece in range(start.piece, self._strand.num_pieces):
            chunks = self._strand.chunks(piece)
            for number in range(start.split if piece == start.piece else 0, len(chunks)):
                for rows in read_rows(chunks[number].split, self._recipe.options, place):
                    mark = Progress(
                        self._part, start.strand, record=record, skipped=skipped, piece=piece, split=number,
                        place=rows.place, last_piece=piece, last_split=number, last_end=rows.end or None,
                    )  # fmt: skip
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

    def _count_bad(self, rows: Rows, num_skipped: int) -> None:
        for error in rows.errors:
            _log.info("skipped: %s", error)
        self._num_skipped = num_skipped


def _up_to(latest: Progress, mark: Progress) -> Progress:
    last_piece, last_split, last_end = latest[-3:]
    return mark._replace(last_piece=last_piece, last_split=last_split, last_end=last_end)


def _refusal(rows: Rows) -> FormatError:
    first = min(rows.errors, key=lambda error: error.row)
    return FormatError(
        f"{first} (reason: {first.reason}). Repair or remove it, or skip bad records with on_error='skip', which can "
        "also resume from this stream's state."
    )
