"""What datasets and plans share: the verbs that add a stage, what a plan is built on, and whole batches for torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from numpy.typing import ArrayLike, DTypeLike

from penstock.packing import PackingSettings
from penstock.plan._rows import RowSource
from penstock.plan._stages import (
    Balanced,
    Batch,
    Cast,
    Labels,
    Map,
    Mode,
    OnFault,
    OnLong,
    Pack,
    Pad,
    Positions,
    Repeat,
    SampleWeights,
    Shuffle,
    Side,
    Skip,
    Stage,
    Stages,
    Tail,
    Weighted,
    Window,
)
from penstock.schema import name_of_dtype

PlanType = TypeVar("PlanType")
"""`Plan`, which stands above this module."""


class Verbs(ABC, Generic[PlanType]):
    """What `Dataset` and `Plan` have in common: each verb gives a plan with one more stage."""

    @abstractmethod
    def as_plan(self) -> PlanType:
        """The plan so far."""

    @abstractmethod
    def with_stage(self, stage: Stage) -> PlanType:
        """The plan with one more stage, if it may follow those before it."""

    def cast(self, /, **dtypes: DTypeLike) -> PlanType:
        """Read columns in a wider dtype, as in `cast(x="int64")` or `cast(x=np.int64)`; it costs no second pass."""
        names = tuple((column, name_of_dtype(dtype)) for column, dtype in dtypes.items())
        return self.with_stage(Cast(dtypes=names))

    def sample(self, weights: str | ArrayLike, *, rows: int | None = None, replacement: bool = True) -> PlanType:
        """Draw samples by weight: in every epoch each as often as its share of the rows says, rounded up or down.

        What is rounded differs between epochs, so that over several of them a sample comes as often as its shares add
        up to, give or take 2 in the first 10 epochs, 3 in the first 100, 4 in the first 1,000.

        Args:
            weights: A column, or one number per sample; only their proportions count.
            rows: Rows in an epoch; as many as there are samples by default.
            replacement: Whether a sample may come more than once in an epoch.
        """
        held = weights if isinstance(weights, str) else SampleWeights(weights)
        return self.with_stage(Weighted(weights=held, rows=rows, replacement=replacement))

    def balance(self, column: str, *, rows: int | None = None, replacement: bool = True) -> PlanType:
        """Take the classes of a column in rounds: with k classes, each round of k rows holds every class once.

        Rounds are counted from the start of the run; without replacement, from the start of the epoch. Any n
        consecutive rows hold n / k rows of a class, give or take fewer than 2. Each class goes through its samples in
        passes, so none comes again before all have come in its pass.

        Args:
            column: Its values are the classes.
            rows: Rows in an epoch; about as many as there are samples by default.
            replacement: Whether a sample may come more than once in an epoch; if not, it ends when the smallest
                class does.
        """
        return self.with_stage(Balanced(column=column, rows=rows, replacement=replacement))

    def shuffle(self, seed: int, mode: Mode = "windows", group: int | None = None, *, lanes: int = 1) -> PlanType:
        """A new order in each epoch. "windows" keeps reads local, "full" permutes everything.

        Args:
            seed: Decides the order; any integer.
            mode: "windows" mixes the rows of `group` storage windows at a time, "full" all of them.
            group: How many storage windows; None is about a gigabyte of them. More mix wider (docs/plans.md has a
                table), read from more places at once and, when packed, keep 5 bytes per document in memory.
            lanes: Deal the shards to this many lanes that take turns, so that each of w ranks needs only 1/w of the
                data, the same in every epoch, if w divides it. The rows of a batch are a good choice, if there are four
                times as many shards. A group is then of shards of a lane, 2 by default.
        """
        return self.with_stage(Shuffle(seed=seed, mode=mode, group=group, lanes=lanes))

    def window(self, length: int, *, column: str = "tokens") -> PlanType:
        """Rows of `length` tokens, cut from all documents laid end to end."""
        return self.with_stage(Window(length=length, column=column))

    def pack(
        self,
        length: int,
        *,
        long: Literal["split", "truncate", "drop"] = "split",
        max_documents: int | None = None,
        column: str = "tokens",
        labels: Labels = "next",
        positions: Positions = "restart",
        pad: int = 0,
        keep: str | Sequence[str] = (),
        cost: str | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> PlanType:
        """Rows of whole documents side by side, so that next to nothing is padding.

        Args:
            length: Tokens in a row.
            long: Documents longer than a row are split, truncated or dropped; the ledger counts what that costs.
            max_documents: At most this many documents in a row; gives `cu_seqlens` a fixed length, but pads rows of
                short documents.
            column: The column to pack.
            labels: "next" for labels that are shifted already, "same" for models that shift, as Hugging Face's do.
            positions: Whether the later pieces of a split document start at position 0 or continue.
            pad: Token id for the few places that hold no token.
            keep: Columns to carry beside the tokens: one value per document, one per token, or byte strings.
            cost: A column that says how many places of a row a document takes, if not one for each of its tokens: where
                a mapped function puts more of them into the batch. Needs `long="drop"`.
            limits: Further budgets of a row, such as `{"num_images": 16}`: a column of numbers, or one whose lengths
                count. Needs `long="drop"`, which also leaves out documents that exceed a limit.
        """
        budgets = dict(limits or {})
        settings = PackingSettings(
            length=length, long=long, max_documents=max_documents, limits=tuple(budgets.values())
        )
        shown: dict[str, Any] = {"labels": labels, "positions": positions, "pad": pad}
        shown |= {"cost": cost, "limits": tuple(budgets)}
        return self.with_stage(Pack(settings=settings, column=column, keep=_names(keep), **shown))

    def pad(
        self,
        length: int | None = None,
        *,
        multiple: int = 1,
        column: str = "tokens",
        labels: Labels = "next",
        pad: int = 0,
        side: Side = "right",
        keep: str | Sequence[str] = (),
        bucket: int | None = None,
        run: int = 32,
        run_tokens: int | None = None,
    ) -> PlanType:
        """Rows of one document each, padded to the longest of a rank's batch: for fine-tuning and evaluation.

        Args:
            length: Cut documents off after this many tokens; the ledger counts what that costs.
            multiple: Rows are a multiple of this many tokens long. With `multiple=length`, always as long.
            column: The column that holds the tokens.
            labels: "next" for labels that are shifted already, "same" for models that shift, as Hugging Face's do.
            pad: Token id of the places that hold no token.
            side: Where the padding is.
            keep: Columns to have beside the tokens: one value per document, one per token, or byte strings.
            bucket: Sort this many rows of the order at a time by length, so that the rows of a batch are alike.
            run: Rows of similar length that then stay together: the batch size, or a multiple of it, pads least.
            run_tokens: Make runs as long as this many tokens allow, in multiples of `run` rows: for batches of
                batch(tokens=run_tokens, multiple=run, tail="drop").
        """
        shown: dict[str, Any] = {"labels": labels, "pad": pad, "side": side, "keep": _names(keep)}
        shown |= {"bucket": bucket, "run": run, "run_tokens": run_tokens}
        return self.with_stage(Pad(length=length, multiple=multiple, column=column, **shown))

    def skip(self, *, rows: int) -> PlanType:
        """Epochs without their first `rows` rows."""
        return self.with_stage(Skip(rows=rows))

    def repeat(self, times: int) -> PlanType:
        """Epochs of `times` passes, each in its own order: one `for` loop runs through all of them."""
        return self.with_stage(Repeat(times=times))

    def map(
        self,
        function: Callable[..., Any],
        *,
        batched: bool = False,
        ragged: str | Sequence[str] = (),
        on_error: OnFault = "raise",
    ) -> PlanType:
        """Apply `function(row, rng)` or `function(row)` to every row, or to every batch.

        The generator is derived from seed and row, so a row comes out the same wherever it is computed.

        Args:
            batched: Give the function a batch, as a dict of columns, and not a row.
            ragged: Columns that the function returns in any length: they are `Ragged` in every batch. Others are
                only where their lengths differ, and arrays where they do not; "target.boxes" is one in a dict.
            on_error: "skip" replaces a row for which the function fails by another of the epoch, and says so in
                `is_replaced` and `num_replaced` of the batch.
        """
        stage = Map(function=function, batched=batched, ragged=_names(ragged), on_error=on_error)
        return self.with_stage(stage)

    def batch(
        self,
        global_size: int | None = None,
        *,
        tokens: int | None = None,
        multiple: int = 1,
        long: OnLong = "raise",
        tail: Tail = "carry",
        balance: str | Mapping[str, float] | None = None,
    ) -> PlanType:
        """Cut the rows into batches of `global_size`, counted over all ranks, or of at most so many tokens.

        Args:
            global_size: Rows in a batch.
            tokens: Instead, as many rows as this many tokens hold, padding included, over all ranks.
            multiple: Then, the number of rows is a multiple of this; ranks and micro-batches must divide it.
            long: And rows that are too long for that are an error, or "drop" puts others in their place, marked in
                `is_repeated` and with labels of -100; the ledger counts them. pad(length=...) cuts them.
            tail: What becomes of an epoch's last rows: "carry" joins them with the next epoch's first, for training;
                "even" gives every rank as many of them, one at least, for evaluation; see docs/plans.md for the rest.
            balance: Deal the rows of each batch to ranks and micro-batches so that all cost the same: "attention" (the
                sum of squared document lengths), "tokens", a column of numbers, or a weighted sum of these, as in
                `{"tokens": 1, "attention": 1 / 4096}`. None deals them in turn.
        """
        shown: dict[str, Any] = {"tokens": tokens, "multiple": multiple, "long": long, "balance": balance}
        return self.with_stage(Batch(global_size=global_size, tail=tail, **shown))


class PlanInput(Protocol):
    """What a plan is built on: a `Dataset`, or the `Mix` of several plans."""

    @property
    def fingerprint(self) -> str:
        """Identity of the data."""

    @property
    def tokenizers(self) -> dict[str, str]:
        """The tokenizers whose tokens it holds, as far as it says: name by digest."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels, as far as it says."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Fingerprints of the folders of shards under it, which `penstock.open(path, as_of=state)` looks for."""

    def build_rows(self, stages: Stages) -> RowSource:
        """The rows that these stages make of it."""

    def check_stage(self, stage: Stage) -> None:
        """Raise `StageError` for a stage that cannot follow it."""

    def select_columns(self, names: Iterable[str]) -> PlanInput:
        """The same samples with only these columns."""

    def map_seed(self, stages: Stages) -> int:
        """What the generators of mapped functions derive from."""

    def order_facts(self, stages: Stages) -> dict[str, str]:
        """What decides the order of rows, fact by fact."""

    def to_json(self) -> dict[str, Any]:
        """The source in a plan file; `ValueError` when a file cannot name it."""


class WholeBatch(ABC):
    """Stands where torch's own `DataLoader` has the indices of a batch.

    Torch's loader asks a dataset for the samples that its batch sampler names. A plan has no samples to give, and a
    batch is more than its samples: packed rows, batched maps, targets counted over all ranks. So a batch sampler made
    for a plan names whole batches, and plans and datasets answer such a name with what it stands for.
    """

    @abstractmethod
    def take(self) -> dict[str, Any]:
        """The batch."""


def _names(columns: str | Sequence[str]) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns)
