"""The shuffle buffer of a stream, whose contents no state holds.

They can be computed: the buffer has `size` slots. Record number n goes
into slot n while slots are free. Then output j takes the record in slot `draw(j)`, and the next record read, number
size + j, takes its place. When no more records come, output j takes one of the slots left, and the last slot moves into
the gap. Draws depend only on the key and on j. So after `num_out` outputs, a slot holds the record that replaced the
last output drawn from it. Looking back finds the last draw of every slot within about size * ln(size) outputs, whatever
`num_out` is: 0.5 ms for a buffer of 1,000, 80 ms for 100,000.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
