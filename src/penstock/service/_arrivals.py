"""What has arrived from a server: a body in a slot, and the batches in it.

A body is read into memory that becomes the batch, as a worker process would have written it: its arrays are views of
the slot. Only arrays inside lists and dicts are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import FormatError
from penstock.loader import Batch, BatchLayout, Bundle, Item, PlacedArray, PlacedRagged
from penstock.schema import dtype_name
from penstock.service._wire import Arrangement, SentArray, SentRagged, decode, header_of

_MAX_KNOWN, _MAX_KNOWN_BYTES = 64, 16 << 10


class Layouts:
    """Layouts of bodies by their headers, kept for bodies that hold only arrays: most of those have the same header.

    Not parsing it again saves 5 % of what a client does for a body of 8 MiB.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int, int], tuple[BatchLayout, Arrangement]] = {}

    def find(self, body: memoryview, num_batches: int) -> tuple[BatchLayout, Arrangement]:
        """(layout, arrangement) of a body with this many batches."""
        head = header_of(body)
        key = (head, len(body), num_batches)
        found = self._known.get(key)
        if found is None:
            values, arrangement = decode(body)
            parts = {name: _part(value, body) for name, value in values.items()}
            _check_arrangement(arrangement, parts, num_batches)
            layout = BatchLayout(parts, num_pieces=num_batches if arrangement == "stacked" else 1)
            found = layout, arrangement
            is_fixed = all(isinstance(part, PlacedArray) for part in parts.values())
            if is_fixed and len(self._known) < _MAX_KNOWN and len(head) < _MAX_KNOWN_BYTES:
                self._known[key] = found
        return found


@dataclass(frozen=True, slots=True)
class Arrived:
    """A body in a slot."""

    slot: Any
    layout: BatchLayout
    arrangement: Arrangement
    num_batches: int
    seconds: float
    """Time from the request to the last byte."""

    @classmethod
    def read(cls, slot: Any, size: int, item: Item | Bundle, seconds: float, layouts: Layouts) -> Arrived:
        """What the first `size` bytes of a slot hold.

        Raises:
            FormatError: they are not a body of this version.
        """
        num_batches = item.num_steps * item.num_parts if isinstance(item, Bundle) else 1
        with memoryview(slot.memory(size)) as whole, whole[:size] as body:
            layout, arrangement = layouts.find(body, num_batches)
        return cls(slot, layout, arrangement, num_batches, seconds)

    def cut(self, batches: list[Batch]) -> list[Batch]:
        """The batches of the item, one by one, from what the layout gave."""
        if self.arrangement != "separate":
            return batches
        separate: list[Batch] = [{} for _ in range(self.num_batches)]
        for name, value in batches[0].items():
            place, _, key = name.partition("/")
            separate[int(place)][key] = value
        return separate


def _check_arrangement(arrangement: Arrangement, parts: dict[str, Any], num_batches: int) -> None:
    """Refuse an answer that cannot be cut into the batches asked for."""
    match arrangement:
        case "one":
            is_cut = num_batches == 1
        case "stacked":
            shapes = [part.shape for part in parts.values() if isinstance(part, PlacedArray)]
            is_cut = len(shapes) == len(parts) and all(shape and shape[0] % num_batches == 0 for shape in shapes)
        case "separate":
            places = {name.partition("/")[0] for name in parts}
            is_cut = places <= set(map(str, range(num_batches)))
    if not is_cut:
        raise FormatError(f"The server's answer, {arrangement!r}, does not hold the {num_batches} batches asked for.")


def _part(value: Any, body: memoryview) -> Any:
    """What a batch's layout has for a value that was sent; arrays inside lists and dicts are copied."""
    match value:
        case SentArray():
            return _placed(value)
        case SentRagged():
            return PlacedRagged(_placed(value.values), _placed(value.offsets), value.is_bytes)
    return _copied(value, body)


def _placed(array: SentArray) -> PlacedArray:
    return PlacedArray(array.offset, array.shape, dtype_name(array.dtype), array.offset + array.num_bytes)


def _copied(value: Any, body: memoryview) -> Any:
    match value:
        case SentArray():
            return value.view(body).copy()
        case SentRagged():
            return value.copy(body)
        case dict():
            return {key: _copied(each, body) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_copied(each, body) for each in value)
    return value
