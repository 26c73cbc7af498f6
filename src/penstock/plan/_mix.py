"""What `penstock.mix` was given, checked: several plans, each with its share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

from penstock.errors import StageError
from penstock.identity import digest
from penstock.order import derive_key
from penstock.plan._arguments import whole_number
from penstock.plan._dataset import Dataset
from penstock.plan._mixed_rows import MixedRows, mix_rows
from penstock.plan._plan import Plan, Stages
from penstock.plan._stage_rules import LEGAL_ORDER, order_facts
from penstock.plan._stages import Batch, Map, Stage, TakeRows


@dataclass(frozen=True, slots=True)
class Mix:
    """Several plans, each with its share."""

    sources: tuple[tuple[str, Plan, float], ...]
    seed: int
    epoch: int | str
    """Rows in an epoch, or the source whose pass is one."""
    different_tokenizers: bool = False
    """Whether the sources may hold tokens of different tokenizers."""

    @classmethod
    def of(
        cls,
        sources: Mapping[str, tuple[Plan | Dataset, float]],
        *,
        seed: int,
        rows: int | None,
        epoch: str | None,
        different_tokenizers: bool,
    ) -> Mix:
        """A mixture from what `penstock.mix` was given."""
        if not isinstance(sources, Mapping):
            raise TypeError(f"mix(): the sources are {{name: (stages, weight)}}, not {type(sources).__name__}.")
        if not sources:
            raise ValueError("mix() needs at least one source.")
        if (rows is None) == (epoch is None):
            raise ValueError("mix(): give rows=, the rows in an epoch, or epoch=, the source whose pass is one.")
        if epoch is not None and epoch not in sources:
            raise ValueError(f"mix(epoch={epoch!r}): the sources are {', '.join(map(repr, sources))}.")
        length = epoch if epoch is not None else whole_number("mix", "rows", rows, at_least=1, at_most=2**62)
        parts = tuple(_checked_part(name, source) for name, source in sources.items())
        mixture = cls(parts, whole_number("mix", "seed", seed), length, different_tokenizers)
        mixture.check_tokenizers()
        mixture.build_rows()  # weights and columns that do not fit are an error here
        return mixture

    @property
    def tokenizers(self) -> dict[str, str]:
        """Those of all sources."""
        return {key: name for _, plan, _ in self.sources for key, name in plan.source.tokenizers.items()}

    def check_tokenizers(self) -> None:
        """Refuse sources whose token ids mean different things, unless that was asked for."""
        if self.different_tokenizers or len(self.tokenizers) < 2:
            return
        made = ", ".join(
            f"{part!r} with {name} ({key[:8]})"
            for part, plan, _ in self.sources
            for key, name in plan.source.tokenizers.items()
        )
        raise ValueError(
            f"mix(): the sources were made with different tokenizers, so one token id means different things: {made}. "
            "Prepare them with one tokenizer, or pass different_tokenizers=True if that is what you want."
        )

    def build_rows(self, stages: Stages = ()) -> MixedRows:
        """What the mixture reads from; the stages that may follow change no row."""
        parts = {name: (plan.row_source, weight) for name, plan, weight in self.sources}
        return mix_rows(parts, seed=self.seed, epoch=self.epoch)

    def check_stage(self, stage: Stage) -> None:
        """Only take(), skip(), repeat(), map() and batch() can follow."""
        if stage.level < TakeRows.level:
            raise StageError(f"{stage.verb}() cannot follow mix(). The order is {LEGAL_ORDER}.")

    def select_columns(self, names: Iterable[str]) -> NoReturn:
        """Always refused."""
        raise StageError(f"select_columns() cannot follow mix(). The order is {LEGAL_ORDER}.")

    def map_seed(self, stages: Stages) -> int:
        """A seed of the mixture's own."""
        return derive_key(self.seed, "mix")

    def order_facts(self, stages: Stages) -> dict[str, str]:
        """How sources are dealt, and the order of each."""
        shares = ", ".join(f"{name} {quota}/65536" for name, quota in self.quotas.items())
        parts = {f"source {name}": plan.order_fingerprint[:16] for name, plan, _ in self.sources}
        return {"mix": f"seed={self.seed}, epoch={self.epoch!r}, {shares}", **parts, **order_facts(stages)}

    def to_json(self) -> dict[str, Any]:
        """The mixture in a plan file."""
        parts = {name: {"weight": weight, **plan.to_json()} for name, plan, weight in self.sources}
        length = {"rows" if isinstance(self.epoch, int) else "epoch": self.epoch}
        said = {"different_tokenizers": True} if self.different_tokenizers else {}
        return {"seed": self.seed, **length, **said, "mix": parts}

    @property
    def quotas(self) -> dict[str, int]:
        """Rows of each source in every 65,536."""
        return dict(zip((name for name, _, _ in self.sources), self.build_rows().mixture.quotas, strict=True))

    @property
    def fingerprint(self) -> str:
        """Identity of the parts and how they are dealt."""
        parts = [[name, plan.fingerprint, weight] for name, plan, weight in self.sources]
        return digest(json.dumps([parts, self.seed, self.epoch]))

    def __repr__(self) -> str:
        lines = [f"mix(seed={self.seed}, {'rows' if isinstance(self.epoch, int) else 'epoch'}={self.epoch!r})"]
        quotas = self.quotas
        for name, plan, _ in self.sources:
            inner = repr(plan).replace("\n", "\n    ")
            lines.append(f"  {name}: {quotas[name]}/65536 of {inner}")
        return "\n".join(lines)


def mix(
    sources: Mapping[str, tuple[Plan | Dataset, float]],
    *,
    seed: int,
    rows: int | None = None,
    epoch: str | None = None,
    different_tokenizers: bool = False,
) -> Plan:
    """Rows of several plans in fixed shares.

    Args:
        sources: `{name: (stages, weight)}`; the stages end with shuffle, window or pack. Weights are any
            positive numbers; they are rounded to 1/65,536.
        seed: Decides whose turn it is.
        rows: Rows in an epoch of the mixture.
        epoch: Or the name of a source: an epoch is one pass over it.
        different_tokenizers: Take sources whose token ids mean different things, which is refused otherwise.

    >>> import numpy as np, penstock
    >>> a, b = (penstock.from_arrays({"x": np.full(100, value)}) for value in (0, 1))
    >>> plan = mix({"a": (a.shuffle(seed=1), 0.75), "b": (b.shuffle(seed=1), 0.25)}, seed=7, rows=1000).batch(96)
    >>> int(plan.read(0)["x"].sum())
    24
    """
    return Plan(Mix.of(sources, seed=seed, rows=rows, epoch=epoch, different_tokenizers=different_tokenizers))


def _checked_part(name: object, source: object) -> tuple[str, Plan, float]:
    if not isinstance(name, str):
        raise TypeError(f"mix(): {name!r} cannot name a source; names are text.")
    if not isinstance(source, tuple | list) or len(source) != 2:
        raise TypeError(f"mix(): {name!r} must be (stages, weight), as in (ds.shuffle(seed=1).pack(4096), 0.7).")
    stages, weight = source
    if not isinstance(stages, Dataset | Plan):
        raise TypeError(f"mix(): {name!r} is {type(stages).__name__}; a source is a Penstock dataset or plan.")
    if not isinstance(weight, Real) or not 0 < float(weight) < math.inf:
        raise ValueError(f"mix(): the weight of {name!r} is {weight!r}; weights are positive, finite numbers.")
    plan = stages.as_plan()
    for stage in plan.stages:
        if isinstance(stage, (Map, Batch)):
            raise StageError(
                f"mix(): {name!r} ends with {stage.verb}(), which comes after mix. The order is {LEGAL_ORDER}."
            )
    return name, plan, float(weight)
