"""Plan: every batch as a pure function of a few numbers.

A plan is a source (a dataset, or a mixture of plans) and a tuple of stages, nothing else. `read` computes any
batch of any epoch for any rank from those and its arguments: no stored order, and no difference between the first
batch and the millionth.

    run:    row 0 1 2 3 ...                                  endless, absolute, the same for all settings below
    epoch:  rows [e * num_rows, (e + 1) * num_rows)
    batch:  `global_size` consecutive rows
    rank r of w:  rows r, r + w, r + 2 w, ... of a batch
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StageError, whole_number
from penstock.identity import digest
from penstock.order import ORDER_VERSION
from penstock.plan._accounts import COUNTED_BATCH, DocumentTrace, Ledger, Mixing
from penstock.plan._budget import BudgetSteps
from penstock.plan._dealing import Dealer, Imbalance, find_costs
from penstock.plan._egress import Egress, EgressSettings, find_egress
from penstock.plan._mapping import is_marked_pure, is_pure
from penstock.plan._reading import BatchReader, TargetSums
from penstock.plan._rows import BatchArrays, OutputArrays, RowSource, resize_epoch
from penstock.plan._stages import (
    ATTENTION,
    LEGAL_ORDER,
    Balanced,
    Batch,
    Cast,
    Labels,
    Map,
    Pack,
    Pad,
    Repeat,
    Skip,
    Stage,
    Stages,
    TakeRows,
    Weighted,
    Window,
    check_next,
    costs_of,
    num_lanes,
    with_groups,
    without_groups,
)
from penstock.plan._steps import Steps, checked_epoch
from penstock.plan._text import Decode, Tokenizer, describe_stage, show_batch, stage_identity, stage_json, write_toml
from penstock.plan._uses import RowRange, make_uses
from penstock.plan._verbs import PlanInput, Verbs, WholeBatch
from penstock.shards import ShardFolder, TarStorage

if TYPE_CHECKING:
    from penstock.remote import Uses

_LOOKED_AT = 64
"""Steps that tell how unequal ranks are."""

FILE_VERSION = 1
"""Version of plan files."""


class Plan(Verbs["Plan"]):
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

    def __init__(self, source: PlanInput, stages: Stages = ()) -> None:
        self.source = source
        self.stages = stages
        self._output_arrays: dict[int, OutputArrays] = {}

    @functools.cached_property
    def row_source(self) -> RowSource:
        """What the rows are read from, before map and batch."""
        rows = self.source.build_rows(self.stages)
        for stage in self.stages:
            rows = resize_epoch(rows, stage) if isinstance(stage, (TakeRows, Skip, Repeat)) else rows
        return rows

    @functools.cached_property
    def steps(self) -> Steps:
        """How rows are cut into batches: the arithmetic of steps, rows and tails."""
        if self._batch is None:
            raise StageError(f"The plan has no batch() yet, so it has no batches. The order is {LEGAL_ORDER}.")
        batch = self._batch
        if batch.tokens is not None:
            drops = batch.long == "drop"
            return BudgetSteps(self.num_rows, batch.multiple, batch.tail, self.row_source, batch.tokens, drops)
        assert batch.global_size is not None
        return Steps(self.num_rows, batch.global_size, batch.tail)

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return self.row_source.num_rows

    @property
    def global_size(self) -> int:
        """Rows in a batch, over all ranks; of batch(tokens=...), what their number is a multiple of."""
        return self.steps.global_size

    @property
    def token_budget(self) -> int | None:
        """Tokens that a batch may have, over all ranks, with batch(tokens=...)."""
        return None if self._batch is None else self._batch.tokens

    def num_batches(self, epoch: int = 0) -> int:
        """Batches that start in an epoch; with tail="carry" epochs differ by one, with batch(tokens=...) by more."""
        return self.steps.num_batches(epoch)

    def row_of(self, step: int, epoch: int = 0) -> int:
        """Absolute number of the first row of a step."""
        return self.steps.row_of(step, epoch)

    @property
    def labels(self) -> Labels | None:
        """Whether the labels that the plan makes are of the "next" token or of the "same"; None if it makes none."""
        pieces = self.row_source.piece_source
        if pieces is not None:
            return pieces.stage.labels
        return "next" if self.row_source.makes_labels else None

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The users' functions that rows pass through, in this order."""
        return tuple(stage.function for stage in self._maps)

    def without_maps(self) -> Plan:
        """The same rows and batches without users' functions: what is left of a batch's time is theirs."""
        return Plan(self.source, tuple(stage for stage in self.stages if not isinstance(stage, Map)))

    @property
    def runs_python(self) -> bool:
        """Whether a mapped function may hold the GIL: any that is not marked pure."""
        return any(not is_marked_pure(stage.function) for stage in self._maps)

    @property
    def needs_isolation(self) -> bool:
        """Whether a mapped function may touch global state, and so must not run in threads."""
        return any(not is_pure(stage.function) for stage in self._maps)

    @property
    def replaces_rows(self) -> bool:
        """Whether a mapped function may fail at a row, which another then stands in for."""
        return any(stage.on_error == "skip" for stage in self._maps)

    @property
    def is_rectangular(self) -> bool:
        """Whether several batches side by side are one batch of more rows: no array is about a batch as a whole."""
        return (
            self.row_source.is_rectangular
            and not self._maps
            and self._batch is not None
            and self._batch.balance is None
            and self.token_budget is None
            and self._batch.tail not in ("pad", "even")
        )

    def as_plan(self) -> Plan:
        """Itself."""
        return self

    @property
    def has_own_epochs(self) -> bool:
        """Whether take(), skip() or repeat() says how long an epoch is."""
        return any(isinstance(stage, (TakeRows, Skip, Repeat)) for stage in self.stages)

    def with_stage(self, stage: Stage) -> Plan:
        """The plan with one more stage, if it may follow those before it."""
        check_next(self.stages, stage)
        self.source.check_stage(stage)
        plan = Plan(self.source, (*self.stages, stage))
        if isinstance(stage, (Map, Batch)) and "row_source" in vars(self):
            vars(plan)["row_source"] = self.row_source  # neither changes the rows, and counting packed ones takes time
        if isinstance(stage, (TakeRows, Skip, Repeat)):
            vars(plan)["row_source"] = resize_epoch(self.row_source, stage)
        if isinstance(stage, Batch) and stage.tokens is not None:
            plan.steps  # noqa: B018 - as above
        if isinstance(stage, Batch) and stage.balance is not None:
            find_costs(plan.row_source, np.arange(min(1, plan.num_rows)), costs_of(stage.balance))  # or an error now
        if isinstance(stage, (Cast, Weighted, Balanced, Window, Pack, Pad)):
            plan.row_source  # noqa: B018 - a column that does not fit is an error here, not at the first batch
        return plan

    def join_steps(self, num_steps: int) -> Plan:
        """The same rows, `num_steps` batches of them at a time; callers must not cross the end of an epoch."""
        assert self._batch is not None
        plan = Plan(self.source, (*self.stages[:-1], Batch(global_size=self.global_size * num_steps)))
        vars(plan)["row_source"] = self.row_source
        return plan

    def select_columns(self, names: Iterable[str]) -> Plan:
        """The same samples with only these columns; it comes first, as cast() does."""
        last = next((stage.verb for stage in reversed(self.stages) if not isinstance(stage, Cast)), None)
        if last is not None:
            raise StageError(f"select_columns() cannot follow {last}(). The order is {LEGAL_ORDER}.")
        plan = Plan(self.source.select_columns(names), self.stages)
        plan.row_source  # noqa: B018 - a cast of a column that is gone is an error here
        return plan

    def take(self, *, rows: int | None = None, tokens: float | None = None) -> Plan:
        """Epochs of this many rows: the first of each pass, or of several passes if one has fewer.

        Args:
            rows: Rows in an epoch.
            tokens: Or as many rows as hold this many tokens: the budget of a run, rounded down to whole rows.
        """
        return self.with_stage(TakeRows(rows=rows, tokens=tokens))

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
        return self._reader.read_at(self.steps.row_of(step, epoch), rank, world_size, 0, 1, out)

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

        With tail="drop", rows at an epoch's end that fill no batch come as a short one; `steps.skip_tail` skips them.
        `part` of `num_parts` gives some consecutive rows of the rank's, for accumulating gradients; targets are
        still counted over the whole step.
        """
        return self._reader.read_at(whole_number("read_at", "row", row), rank, world_size, part, num_parts, out)

    def __getitems__(self, batch: WholeBatch) -> dict[str, Any]:
        """A whole batch, as torch's own `DataLoader` asks for it when a framework builds one from a plan's loader."""
        return batch.take()

    def output_arrays(self, num_rows: int) -> OutputArrays:
        """(shape, dtype) of the arrays that `out` may offer for a batch of `num_rows` rows."""
        found = self._output_arrays.get(num_rows)
        if found is None:
            found = self._output_arrays[num_rows] = self.row_source.output_arrays(num_rows)
        return found

    def will_need(self, row: int) -> None:
        """Tell the kernel which data the batch at a row, and those after it, will need."""
        for hints, at in self.row_source.page_hints(row):
            hints.will_need(at)

    def dont_need(self, row: int) -> None:
        """Tell the kernel which data is no longer needed, when batches are read in order up to the one at a row.

        It leaves the page cache once no process has it mapped; reading it again, in another run say, costs the disk.
        """
        for hints, at in self.row_source.page_hints(row):
            hints.dont_need(at)

    @functools.cached_property
    def shard_folders(self) -> tuple[ShardFolder | TarStorage, ...]:
        """The folders of shards that are read, source by source and part by part, each once: what `uses` numbers."""
        found = self.row_source.reads(RowRange(0, 0))
        return tuple(dict.fromkeys(layer.folder for _, layers in found for layer in layers))

    def uses(self, begin: int, end: int, *, ranks: Iterable[int] = (0,), world_size: int = 1) -> Uses:
        """Which shards some ranks read between two rows of the run, and when: what a cache fetches ahead by.

        It follows from the plan alone; no data is touched. A shard that is not named is not read, but for rows that
        stand in for others in map(on_error="skip"). One that is named is read for nearly all plans; it may not be where
        rows are few, or in any place: a full shuffle, balance().

        Args:
            begin: Where a batch starts.
            end: The first row of which nothing is asked.
            ranks: The training processes, all those of a node say.
            world_size: How many there are in all.
        """
        numbers = {folder: number for number, folder in enumerate(self.shard_folders)}
        return make_uses(self._reader.reads(begin, end, ranks, world_size), numbers, begin, end)

    def egress(
        self,
        nodes: int = 1,
        ranks: int = 1,
        *,
        cache_bytes: int | None = None,
        bandwidth: float | None = None,
        step_seconds: float | None = None,
        epochs: int = 2,
    ) -> Egress:
        """What nodes would fetch if the data were in an object store, by a simulation: no data is touched.

        Args:
            nodes: Nodes of the run, each with a cache of its own.
            ranks: Training processes on each of them.
            cache_bytes: What a cache holds at most; all that a node needs by default.
            bandwidth: Bytes per second that a node receives.
            step_seconds: Length of a step; with a bandwidth, it follows how long the nodes would wait.
            epochs: How many are simulated.

        Raises:
            StageError: where batches end takes the lengths of all rows, by batch(tokens=...).
            ValueError: a number is not positive, or the ranks cannot share a batch evenly.
        """
        if self.token_budget is not None:
            raise StageError("egress(): how many rows a batch has must be known without data: give them, not tokens=.")
        settings = EgressSettings(
            nodes=nodes,
            ranks=ranks,
            cache_bytes=cache_bytes,
            bandwidth=bandwidth,
            step_seconds=step_seconds,
            epochs=epochs,
        )
        self.steps.rows_at(0, 0, settings.world_size)

        def find_uses(end: int, own: Iterable[int]) -> Uses:
            return self.uses(0, end, ranks=own, world_size=settings.world_size)

        lanes = num_lanes(self.stages)
        return find_egress(settings, self.row_source, self.global_size, lanes, self.shard_folders, find_uses)

    def documents(self, step: int, epoch: int = 0, rank: int = 0, world_size: int = 1) -> list[DocumentTrace]:
        """What a batch was made of: every document, with its place in the batch and the file and row it came from."""
        rows, _ = self._reader.rows_at(self.steps.row_of(step, epoch), rank, world_size)
        return self.row_source.trace(rows)

    def show(
        self,
        step: int,
        tokenizer: Tokenizer | Decode | None = None,
        *,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> str:
        """A batch as text: row by row, where each document begins, where it is from, and how much of it is predicted.

        Args:
            tokenizer: What has a `decode`, or a function from token ids to text; without one, the ids are shown.
            step, epoch, rank, world_size: As for `read`.

        Raises:
            StageError: the rows are not tokens.
        """
        unmapped = dataclasses.replace(self._reader, maps=())
        batch = unmapped.read_at(self.steps.row_of(step, epoch), rank, world_size, 0, 1, None)
        return show_batch(batch, self.documents(step, epoch, rank, world_size), tokenizer)

    def mixing(self) -> list[Mixing]:
        """How far batches are from those of a full shuffle, for each dataset stored in runs of a label or source.

        Empty if none is, or if the shuffle reaches everything at once.
        """
        return self.row_source.mixing()

    def imbalance(
        self,
        world_size: int,
        *,
        balance: str | Mapping[str, float] | None = None,
        steps: Iterable[int] | None = None,
    ) -> Imbalance:
        """How long ranks wait for the one with the longest documents, without batch(balance=...) and with it.

        Args:
            world_size: Number of training processes.
            balance: What is counted, as in batch(balance=...), which is also the default; "attention" without it.
            steps: Steps of the first epoch to look at; None for 64, in four places.

        Raises:
            StageError: the plan has no batch() yet, or all its rows cost the same.
        """
        rows, batch = self.steps, self._batch
        dealer = Dealer(self.row_source, rows, costs_of(balance or (batch and batch.balance) or ATTENTION))
        if steps is None:
            total = self.num_batches()
            firsts = np.linspace(0, max(0, total - _LOOKED_AT // 4), 4).astype(np.int64)
            found = np.unique(firsts[:, None] + np.arange(_LOOKED_AT // 4))
            steps = found[found < total].tolist()
        return dealer.imbalance([rows.row_of(step, 0) for step in steps], world_size)

    def ledger(self, epoch: int = 0, *, try_maps: bool = False) -> Ledger:
        """The account of an epoch: every token placed exactly once, and what padding, cuts, tails and failures cost.

        Args:
            epoch: Which epoch, from 0.
            try_maps: Also run the functions of map(on_error="skip") on all rows of the epoch, here and now, to count
                those at which they fail.

        Raises:
            AssertionError: a token is missing or doubled, which would be a bug in Penstock.
        """
        epoch = checked_epoch(epoch, verb="ledger")
        ledger = self.row_source.ledger(epoch)
        if self._batch is not None:
            ledger = dataclasses.replace(ledger, rows_dropped=self.steps.num_dropped())
        if self._batch is not None and isinstance(self.steps, BudgetSteps):
            ledger = dataclasses.replace(ledger, batches=self.steps.ledger(epoch))
        if self.replaces_rows:
            cut = self if self._batch is not None else self.batch(COUNTED_BATCH)
            replaced = cut._reader.count_replaced(epoch) if try_maps else None
            ledger = dataclasses.replace(ledger, rows_replaced=replaced)
        return ledger

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the whole plan: equal fingerprints give equal batches."""
        stages = [stage_identity(stage) for stage in with_groups(self.stages)]
        return _fingerprint([self.order_fingerprint, self.source.fingerprint, stages])

    @functools.cached_property
    def order_fingerprint(self) -> str:
        """Identity of what decides which documents are row i of epoch e, and of nothing else."""
        return _order_fingerprint(self.row_source.order_identity)

    def find_row(self, order_fingerprint: str, epoch: int, row: int, epoch_rows: int = 0) -> int | None:
        """The absolute row of a place in the run of a plan with this order; None if rows before it are not this plan's.

        Args:
            order_fingerprint: The order of the plan then.
            epoch, row: The place: an epoch, and a row of it.
            epoch_rows: Rows in an epoch then, where take(), skip() or repeat() said so.
        """
        if order_fingerprint == self.order_fingerprint:
            return epoch * self.num_rows + row
        for identity, end, rows_then in self.row_source.earlier_orders(epoch_rows):
            if epoch * rows_then + row <= end and _order_fingerprint(identity) == order_fingerprint:
                return epoch * rows_then + row
        return None

    @functools.cached_property
    def order_facts(self) -> Mapping[str, str]:
        """What `order_fingerprint` is made of, in words: what a state shows when it is refused."""
        return self.source.order_facts(self.stages)

    @functools.cached_property
    def folders(self) -> tuple[str, ...]:
        """Fingerprints of the folders of shards under it, as they are now, where `order_facts` does not have them."""
        data = self.order_facts.get("data")
        return tuple(folder for folder in self.source.folders if digest(folder) != data)

    def to_toml(self) -> str:
        """The plan as a TOML file that `penstock.load_plan` reads; `ValueError` for what a file cannot name."""
        return write_toml({"version": FILE_VERSION, **self.to_json()})

    def to_json(self) -> dict[str, Any]:
        """The source and the stages as plain data; `ValueError` for what a file cannot name."""
        stages = [stage_json(stage) for stage in with_groups(self.stages)]
        return {"source": self.source.to_json(), **({"stages": stages} if stages else {})}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        stages = without_groups(self.stages)
        return "\n".join([f"Plan {self.source!r}", *(f"  .{describe_stage(stage)}" for stage in stages)])

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        return Plan, (self.source, self.stages)

    @functools.cached_property
    def _maps(self) -> tuple[Map, ...]:
        return tuple(stage for stage in self.stages if isinstance(stage, Map))

    @functools.cached_property
    def _batch(self) -> Batch | None:
        last = self.stages[-1] if self.stages else None
        return last if isinstance(last, Batch) else None

    @functools.cached_property
    def _reader(self) -> BatchReader:
        pieces = self.row_source.piece_source
        targets = None if pieces is None else TargetSums(pieces)
        seed, are_apart = self.source.map_seed(self.stages), num_lanes(self.stages) > 1
        return BatchReader(self.row_source, self.steps, self._maps, seed, targets, self._dealer, are_apart)

    @functools.cached_property
    def _dealer(self) -> Dealer | None:
        balance = None if self._batch is None else self._batch.balance
        return None if balance is None else Dealer(self.row_source, self.steps, costs_of(balance))


def _order_fingerprint(order_identity: Any) -> str:
    return _fingerprint([ORDER_VERSION, order_identity])


def _fingerprint(parts: Any) -> str:
    return digest(json.dumps(parts, sort_keys=True))
