"""The verbs that add a stage, shared by datasets and plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import DTypeLike

from penstock.packing import PackingSettings
from penstock.plan._arguments import name_of_dtype
from penstock.plan._stages import Batch, Cast, Labels, Map, Mode, Pack, Positions, Shuffle, Tail, Window

if TYPE_CHECKING:
    from penstock.plan._plan import Plan


class Staged(ABC):
    """Anything a plan can be built on."""

    @abstractmethod
    def as_plan(self) -> Plan:
        """The plan so far."""

    def cast(self, /, **dtypes: DTypeLike) -> Plan:
        """Read columns in a wider dtype, as in `cast(x="int64")` or `cast(x=np.int64)`; it costs no second pass."""
        names = tuple((column, name_of_dtype(dtype)) for column, dtype in dtypes.items())
        return self.as_plan().with_stage(Cast(dtypes=names))

    def shuffle(self, seed: int, mode: Mode = "windows", group: int = 16) -> Plan:
        """Another order in each epoch. "windows" keeps reads local, "full" permutes everything."""
        return self.as_plan().with_stage(Shuffle(seed=seed, mode=mode, group=group))

    def window(self, length: int, *, column: str = "tokens") -> Plan:
        """Rows of `length` tokens, cut from all documents written one behind the other."""
        return self.as_plan().with_stage(Window(length=length, column=column))

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
    ) -> Plan:
        """Rows of whole documents side by side, so that next to nothing is padding.

        Args:
            length: Tokens in a row.
            long: Documents longer than a row are split, truncated or dropped; the ledger counts what that costs.
            max_documents: At most so many documents in a row; gives `cu_seqlens` a fixed length.
            column: The column to pack.
            labels: "next" for labels that are shifted already, "same" for models that shift, as Hugging Face's do.
            positions: Whether the later pieces of a split document start at position 0 or continue.
            pad: Token id of the few places that hold no token.
        """
        settings = PackingSettings(length=length, long=long, max_documents=max_documents)
        return self.as_plan().with_stage(
            Pack(settings=settings, column=column, labels=labels, positions=positions, pad=pad)
        )

    def map(self, function: Callable[..., Any], *, batched: bool = False) -> Plan:
        """Apply `function(row, rng)` or `function(row)` to every row, or to every batch.

        The generator is derived from seed and row, so a row comes out the same wherever it is computed.
        """
        return self.as_plan().with_stage(Map(function=function, batched=batched))

    def batch(self, global_size: int, *, tail: Tail = "carry") -> Plan:
        """Cut the rows into batches of `global_size`, counted over all ranks."""
        return self.as_plan().with_stage(Batch(global_size=global_size, tail=tail))
