"""What a server's workers compute: the answer to one request, ready to be sent.

A worker also encodes it and computes its checksum, while the bytes are in its cache: there are many workers, and one
process that sends what all of them make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from penstock.loader import Arena, Batch, Template, warm_up_for
from penstock.plan import Plan
from penstock.service._wire import Arrangement, BatchRequest, Body, encode
from penstock.workers import WarmUp

_KEPT_TEMPLATES = 8


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
