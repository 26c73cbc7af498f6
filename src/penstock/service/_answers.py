"""Both ends of an answer: a server's worker computes it, and a client cuts it into batches.

    worker                                       client
    ServedWork.compute: read, encode ── body ──► Arrived.read: where each array lies; Arrived.cut: batches

A worker also encodes the answer and computes its checksum, while the bytes are in its cache: there are many workers,
and one process that sends what all of them make. The client reads a body into memory that becomes the batch, as a
worker process would have written it: its arrays are views of the slot. Only arrays inside lists and dicts are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import FormatError
from penstock.loader import Arena, Batch, BatchLayout, Bundle, Item, PlacedArray, PlacedRagged, Template, warm_up_for
from penstock.plan import Plan
from penstock.schema import dtype_name
from penstock.service._wire import Arrangement, BatchRequest, Body, SentArray, SentRagged, decode, encode, header_of
from penstock.workers import WarmUp

_KEPT_TEMPLATES = 8
_MAX_KNOWN, _MAX_KNOWN_BYTES = 64, 16 << 10


class ServedWork:
    """Answers from a plan, in the arrangement that the request's batches allow."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._widened = functools.lru_cache(_KEPT_TEMPLATES)(plan.join_steps)
        self._template = functools.lru_cache(_KEPT_TEMPLATES)(self._make_template)

    @property
    def warm_up(self) -> WarmUp:
        """What workers that read the plan have in common."""
        return warm_up_for(self.plan)

    def compute(self, request: BatchRequest, arena: Arena) -> Batch:
        """Read what is asked for, into the arena if it is one piece; `unpack` takes it apart again."""
        arrangement = self._arrangement(request)
        body = encode(self._read(request, arrangement, arena), arrangement)
        return {"head": body.head, "arrays": body.arrays, "checksum": body.checksum()}

    @staticmethod
    def unpack(batch: Batch) -> tuple[Body, int]:
        """(body, its checksum) of what was computed."""
        return Body(batch["head"], batch["arrays"]), batch["checksum"]

    def announce(self, request: BatchRequest) -> None:
        """Tell the kernel which stretches of the shards come next."""
        self.plan.will_need(request.row)

    def _arrangement(self, request: BatchRequest) -> Arrangement:
        """How the batches of a request lie in its answer."""
        if request.steps == 1:
            return "one"
        is_regular = self.plan.is_rectangular and self.plan.steps.are_regular(request.row, request.steps)
        return "stacked" if is_regular else "separate"

    def _read(self, request: BatchRequest, arrangement: Arrangement, arena: Arena) -> Batch:
        match arrangement:
            case "one":
                return self._read_piece(self.plan, request, arena)
            case "stacked":
                return self._read_piece(self._widened(request.steps), request, arena)
        return {
            f"{place}/{name}": value
            for place, batch in enumerate(self._separate(request))
            for name, value in batch.items()
        }

    def _read_piece(self, plan: Plan, request: BatchRequest, arena: Arena) -> Batch:
        arena.is_seen = plan.has_maps
        row, num_parts = request.row, request.parts if request.steps == 1 else 1
        is_full = plan.steps.next_row(row) - row == plan.global_size
        share = plan.global_size // request.world_size // num_parts
        offer = arena.arrays(self._template(request.steps, share)) if is_full else None
        return plan.read_at(row, request.rank, request.world_size, part=request.part, num_parts=num_parts, out=offer)

    def _separate(self, request: BatchRequest) -> Iterator[Batch]:
        plan, row = self.plan, request.row
        for _ in range(request.steps):
            for part in range(request.parts):
                yield plan.read_at(row, request.rank, request.world_size, part=part, num_parts=request.parts)
            row = plan.steps.settle(plan.steps.next_row(row))

    def _make_template(self, num_steps: int, num_rows: int) -> Template:
        return Template(self._widened(num_steps).output_arrays(num_rows))

    def __reduce__(self) -> tuple[Callable[[Plan], ServedWork], tuple[Any, ...]]:
        return ServedWork, (self.plan,)


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
