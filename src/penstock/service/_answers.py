"""Both ends of an answer: a server's worker computes it, and a client cuts it into batches.

    worker                                       client
    ServedWork.compute: read, encode ── body ──► AnswerReader: where each array lies; Arrived.cut: batches

A worker also encodes the answer and computes its checksum, while the bytes are in its cache: there are many workers,
and one process that sends what all of them make. The client reads a body into memory that becomes the batch, as a
worker process would have written it: its arrays are views of the slot. Only arrays inside lists and dicts are copied.
It knows the plan, and refuses an answer with other rows than it asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import FormatError
from penstock.loader import (
    Arena,
    Batch,
    BatchLayout,
    Bundle,
    Item,
    PlacedArray,
    PlacedRagged,
    place_arrays,
    warm_up_for,
)
from penstock.plan import Plan
from penstock.schema import Ragged
from penstock.service._wire import Arrangement, BatchRequest, Body, decode, encode, header_of
from penstock.workers import WarmUp

_KEPT_LAYOUTS = 8
_MAX_KNOWN, _MAX_KNOWN_BYTES = 64, 16 << 10


class ServedWork:
    """Answers from a plan, in the arrangement that the request's batches allow."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._widened = functools.lru_cache(_KEPT_LAYOUTS)(plan.join_steps)
        self._layout = functools.lru_cache(_KEPT_LAYOUTS)(
            lambda num_steps, num_rows: place_arrays(self._widened(num_steps).output_arrays(num_rows))
        )

    @property
    def warm_up(self) -> WarmUp:
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
        arena.is_seen = bool(plan.functions)
        row, num_parts = request.row, request.parts if request.steps == 1 else 1
        is_full = plan.steps.next_row(row) - row == plan.global_size
        share = plan.global_size // request.world_size // num_parts
        offer = arena.arrays(self._layout(request.steps, share)) if is_full else None
        return plan.read_at(row, request.rank, request.world_size, part=request.part, num_parts=num_parts, out=offer)

    def _separate(self, request: BatchRequest) -> Iterator[Batch]:
        plan, row = self.plan, request.row
        for _ in range(request.steps):
            for part in range(request.parts):
                yield plan.read_at(row, request.rank, request.world_size, part=part, num_parts=request.parts)
            row = plan.steps.skip_tail(plan.steps.next_row(row))

    def __reduce__(self) -> tuple[Callable[[Plan], ServedWork], tuple[Any, ...]]:
        return ServedWork, (self.plan,)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A body in a slot."""

    slot: Any
    layout: BatchLayout
    arrangement: Arrangement
    num_batches: int
    seconds: float
    """Time from the request to the last byte."""

    def cut(self, batches: list[Batch]) -> list[Batch]:
        """The batches of the item, one by one, from what the layout gave."""
        return split_batches(batches[0], self.num_batches) if self.arrangement == "separate" else batches


class AnswerReader:
    """Finds batches of a plan in bodies, and refuses bodies that do not hold the rows asked for.

    Layouts are kept by their headers, for bodies that hold only arrays: most of those have the same header. Not parsing
    it again saves 5 % of what a client does for a body of 8 MiB.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[tuple[bytes, int, tuple[int, ...]], tuple[BatchLayout, Arrangement]] = {}

    def read(self, slot: Any, size: int, item: Item | Bundle, seconds: float) -> Arrived:
        """What the first `size` bytes of a slot hold.

        Raises:
            FormatError: they are not a body of this version, or not the batches asked for.
        """
        num_rows = self._num_rows(item)
        with memoryview(slot.memory(size)) as whole, whole[:size] as body:
            layout, arrangement = self._find_layout(body, num_rows)
        return Arrived(slot, layout, arrangement, len(num_rows), seconds)

    def _find_layout(self, body: memoryview, num_rows: tuple[int, ...]) -> tuple[BatchLayout, Arrangement]:
        head = header_of(body)
        key = (head, len(body), num_rows)
        found = self._known.get(key)
        if found is None:
            parts, arrangement = decode(body)
            self._check(arrangement, parts, num_rows)
            layout = BatchLayout(parts, num_pieces=len(num_rows) if arrangement == "stacked" else 1)
            found = layout, arrangement
            is_fixed = all(isinstance(part, PlacedArray) for part in parts.values())
            if is_fixed and len(self._known) < _MAX_KNOWN and len(head) < _MAX_KNOWN_BYTES:
                self._known[key] = found
        return found

    def _num_rows(self, item: Item | Bundle) -> tuple[int, ...]:
        """Rows of each batch asked for."""
        if not isinstance(item, Bundle):
            return (self._rows_of_batch(item.row, item.rank, item.world_size, item.part, item.num_parts),)
        steps = self._plan.steps
        if steps.are_regular(item.row, item.num_steps):
            return (steps.global_size // item.world_size // item.num_parts,) * (item.num_steps * item.num_parts)
        return tuple(self._rows_of_batch(*each[:5]) for each in item.items())

    def _rows_of_batch(self, row: int, rank: int, world_size: int, part: int, num_parts: int) -> int:
        steps = self._plan.steps
        if steps.next_row(row) - row == steps.global_size:
            return steps.global_size // world_size // num_parts
        rows, _ = steps.rows_at(row, rank, world_size, part, num_parts)
        return len(rows)

    def _check(self, arrangement: Arrangement, parts: dict[str, Any], num_rows: tuple[int, ...]) -> None:
        """Refuse an answer that does not hold the rows asked for."""
        match arrangement:
            case "one":
                is_whole = len(num_rows) == 1 and self._has_rows(parts, num_rows[0])
            case "stacked":
                is_whole = self._plan.is_rectangular and self._has_rows(parts, sum(num_rows))
            case "separate":
                batches = split_batches(parts, len(num_rows))
                is_whole = all(map(self._has_rows, batches, num_rows))
        if not is_whole:
            raise FormatError(
                f"The server's answer, {arrangement!r}, does not hold the rows asked for: {num_rows[:8]}."
            )

    def _has_rows(self, parts: dict[str, Any], num_rows: int) -> bool:
        """Whether a batch has so many rows, as far as the plan says what is in a batch."""
        plan = self._plan
        if any(getattr(stage, "batched", False) for stage in plan.stages):
            return True  # a function of whole batches returns what it likes
        counts = [count for part in parts.values() if (count := _count_rows(part)) is not None]
        if not plan.functions:
            found = {name: (part.shape, part.dtype) for name, part in parts.items() if isinstance(part, PlacedArray)}
            if any(found.get(name) != array for name, array in plan.output_arrays(num_rows).items()):
                return False
            if plan.row_source.piece_source is not None:
                return num_rows in counts  # beside it there are borders of documents, and numbers
        return set(counts) == {num_rows}


def split_batches(parts: dict[str, Any], num_batches: int) -> list[dict[str, Any]]:
    """What belongs to each batch of a separate answer, by its number in front of the name.

    Raises:
        FormatError: a name has no number, or one of a batch that was not asked for.
    """
    batches: list[dict[str, Any]] = [{} for _ in range(num_batches)]
    numbers = {str(number): batch for number, batch in enumerate(batches)}
    for name, part in parts.items():
        number, _, key = name.partition("/")
        if number not in numbers:
            raise FormatError(f"The server's answer has a part {name[:64]!r}; {num_batches} batches were asked for.")
        numbers[number][key] = part
    return batches


def _count_rows(part: Any) -> int | None:
    """How many rows a column has; None for what is not one."""
    match part:
        case PlacedArray(shape=(num_rows, *_)) | np.ndarray(shape=(num_rows, *_)):
            return int(num_rows)
        case PlacedRagged():
            return part.offsets.shape[0] - 1
        case Ragged() | list():
            return len(part)
        case dict():
            return next((count for each in part.values() if (count := _count_rows(each)) is not None), None)
    return None
