"""Plan: every batch as a pure function of a few numbers.

A plan is a dataset (or a mixture of plans) and a tuple of stages, nothing else. `read` computes any
batch of any epoch for any rank from those and its arguments: there is no state, no stored order, and
no difference between the first batch and the millionth.

    run:    row 0 1 2 3 ...                                  endless, absolute, the same for all settings below
    epoch:  rows [e * num_rows, (e + 1) * num_rows)
    batch:  `global_size` consecutive rows
    rank r of w:  rows r, r + w, r + 2 w, ... of a batch
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from penstock.errors import StageError
from penstock.identity import digest
from penstock.order import ORDER_VERSION
from penstock.plan._build import build_rows, seed_of
from penstock.plan._dataset import Dataset
from penstock.plan._describe import describe_order, describe_stage, stage_identity
from penstock.plan._ledger import Ledger, make_plan_ledger
from penstock.plan._mapping import is_marked_pure, is_pure
from penstock.plan._mix import Mix
from penstock.plan._reading import BatchReader
from penstock.plan._rows import Batch as BatchArrays
from penstock.plan._rows import RowSource
from penstock.plan._staged import Staged
from penstock.plan._stages import LEGAL_ORDER, Batch, Cast, Map, Pack, Stage, Window, check_next
from penstock.plan._stepped import Stepped
from penstock.plan._steps import Steps
from penstock.plan._trace import DocumentTrace, trace_rows


class Plan(Staged, Stepped):
    """What `ds.shuffle(...).pack(...).batch(...)` builds. Small, printable, comparable, picklable.

    >>> import numpy as np, penstock
    >>> ds = penstock.from_arrays({"x": np.arange(10)})
    >>> plan = ds.shuffle(seed=7).batch(4)
    >>> plan.num_rows, plan.num_batches(epoch=0)
    (10, 3)
    >>> sorted(int(x) for step in range(2) for x in plan.read(step)["x"]) == sorted(set(range(10)) - {
    ...     int(x) for x in plan.read(2)["x"][:2]})
    True
    """

    def __init__(self, source: Dataset | Mix, stages: tuple[Stage, ...] = ()) -> None:
        self.source = source
        self.stages = stages

    @functools.cached_property
    def row_source(self) -> RowSource:
        """What the rows are read from, before map and batch."""
        return build_rows(self.source, self.stages)

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return self.row_source.num_rows

    @property
    def has_maps(self) -> bool:
        """Whether functions of the user's see the rows."""
        return bool(self._maps)

    @property
    def runs_python(self) -> bool:
        """Whether a mapped function may hold the GIL: any that is not marked pure."""
        return any(not is_marked_pure(stage.function) for stage in self._maps)

    @property
    def needs_isolation(self) -> bool:
        """Whether a mapped function may touch global state, and so must not run in threads."""
        return any(not is_pure(stage.function) for stage in self._maps)

    @property
    def is_rectangular(self) -> bool:
        """Whether several batches side by side are one batch of more rows: nothing in one is about the batch."""
        return (
            self.row_source.is_rectangular
            and not self.has_maps
            and self._batch is not None
            and self._batch.tail != "pad"
        )

    def as_plan(self) -> Plan:
        """Itself."""
        return self

    def with_stage(self, stage: Stage) -> Plan:
        """The plan with a stage more, if it may follow those there are."""
        check_next(self.stages, stage)
        if isinstance(self.source, Mix) and stage.rank < Map.rank:
            raise StageError(f"{stage.verb}() cannot follow mix(). The order is {LEGAL_ORDER}.")
        plan = Plan(self.source, (*self.stages, stage))
        if isinstance(stage, (Map, Batch)) and "row_source" in vars(self):
            vars(plan)["row_source"] = self.row_source  # neither changes the rows, and counting packed ones takes time
        if isinstance(stage, (Cast, Window, Pack)):
            plan.row_source  # noqa: B018 - a column that does not fit is an error here, not at the first batch
        return plan

    def widened(self, num_steps: int) -> Plan:
        """The same rows, `num_steps` batches of them at a time; whoever reads minds where epochs end."""
        assert self._batch is not None
        plan = Plan(self.source, (*self.stages[:-1], Batch(global_size=self.global_size * num_steps)))
        vars(plan)["row_source"] = self.row_source
        return plan

    def select_columns(self, names: Iterable[str]) -> Plan:
        """The same samples with only these columns; it comes first, as cast() does."""
        last = next((stage.verb for stage in reversed(self.stages) if not isinstance(stage, Cast)), None)
        if isinstance(self.source, Mix) or last is not None:
            raise StageError(f"select_columns() cannot follow {last or 'mix'}(). The order is {LEGAL_ORDER}.")
        plan = Plan(self.source.select_columns(names), self.stages)
        plan.row_source  # noqa: B018 - a cast of a column that is gone is an error here
        return plan

    def read(
        self,
        step: int,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> BatchArrays:
        """The batch of a step: a dict of arrays, the same on any machine at any time.

        Args:
            step: Which batch of the epoch, from 0.
            epoch: Which epoch, from 0.
            rank: This training process.
            world_size: Number of training processes; must divide the batch.
            out: Arrays to fill instead of new ones.

        Raises:
            IndexError: the epoch has no such step.
            ValueError: the batch cannot be shared evenly by `world_size` ranks.
        """
        return self.read_at(self._steps.row_of(step, epoch), rank, world_size, out=out)

    def read_at(
        self,
        row: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        part: int = 0,
        num_parts: int = 1,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> BatchArrays:
        """The batch that starts at an absolute row, whatever batches came before it: what resuming needs.

        With tail="drop", rows at an epoch's end that fill no batch come as a short one; `settle` leads past them.
        `part` of `num_parts` gives a stretch of the rank's rows, for accumulating gradients; targets of the
        whole step are counted all the same.
        """
        return self._reader.read_at(row, rank, world_size, part, num_parts, out)

    def output_arrays(self, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of the arrays that `out` may offer for a batch of `num_rows` rows."""
        found = self._output_arrays.get(num_rows)
        if found is None:
            found = self._output_arrays[num_rows] = self.row_source.output_arrays(num_rows)
        return found

    def announce(self, row: int) -> None:
        """Tell the kernel which data the batch at a row, and those after it, will need."""
        self.row_source.announce(row)

    def release(self, row: int) -> None:
        """Tell the kernel which data is done with, when batches are read in order up to the one at a row.

        It leaves the page cache once no process has it mapped. Costs who reads it again, another run for one.
        """
        self.row_source.release(row)

    def documents(self, step: int, epoch: int = 0, rank: int = 0, world_size: int = 1) -> list[DocumentTrace]:
        """What a batch was made of: every document with its place in the batch, its file and its row in it."""
        rows, _ = self._steps.rows_at(self._steps.row_of(step, epoch))
        return trace_rows(self.row_source, self._steps.share(rows, rank, world_size))

    def ledger(self, epoch: int = 0) -> Ledger:
        """The account of an epoch: every token placed exactly once, and what padding, cuts and tails cost.

        Raises:
            AssertionError: a token is missing or doubled, which would be a bug in Penstock.
        """
        return make_plan_ledger(self.row_source, self._steps if self._batch is not None else None, epoch)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the whole plan: equal fingerprints give equal batches."""
        parts = [self.order_fingerprint, self.source.fingerprint, [stage_identity(stage) for stage in self.stages]]
        return _digest(parts)

    @functools.cached_property
    def order_fingerprint(self) -> str:
        """Identity of what decides which documents are row i of epoch e, and of nothing else."""
        return _digest([ORDER_VERSION, self.row_source.order_identity])

    @functools.cached_property
    def order_facts(self) -> Mapping[str, str]:
        """What `order_fingerprint` is made of, in words: what a state tells when it is refused."""
        return describe_order(self.source, self.stages)

    def to_toml(self) -> str:
        """The plan as a TOML file that `penstock.load_plan` reads; refuses what a file cannot name."""
        from penstock.plan._plan_file import plan_to_toml  # it builds plans, so it stands above this module

        return plan_to_toml(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return "\n".join([f"Plan {self.source!r}", *(f"  .{describe_stage(stage)}" for stage in self.stages)])

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        return Plan, (self.source, self.stages)

    @functools.cached_property
    def _maps(self) -> tuple[Map, ...]:
        return tuple(stage for stage in self.stages if isinstance(stage, Map))

    @functools.cached_property
    def _output_arrays(self) -> dict[int, dict[str, tuple[tuple[int, ...], str]]]:
        return {}

    @functools.cached_property
    def _batch(self) -> Batch | None:
        last = self.stages[-1] if self.stages else None
        return last if isinstance(last, Batch) else None

    @functools.cached_property
    def _steps(self) -> Steps:
        if self._batch is None:
            raise StageError(f"The plan has no batch() yet, so it has no batches. The order is {LEGAL_ORDER}.")
        return Steps(self.num_rows, self._batch.global_size, self._batch.tail)

    @functools.cached_property
    def _reader(self) -> BatchReader:
        return BatchReader(self.row_source, self._steps, self._maps, seed_of(self.source, self.stages))


def _digest(parts: Any) -> str:
    return digest(json.dumps(parts, sort_keys=True))
