"""torchtitan, with a plan as its data: the loader that its trainer and its validator build.

    config = llama3_debugmodel()
    config.dataloader = PlanDataLoader.Config(plan="train.toml")  # the text of plan.to_toml()

The trainer says how many rows a rank takes per micro-batch, and which data-parallel rank this is: ranks that share a
model (tensor, pipeline, context parallel) get the same rows, and torchtitan cuts them for context parallelism. The
plan is cut into batches of one micro-batch of all ranks, so a step takes consecutive rows. While `global_batch_size`
stays, step k is therefore made of the same rows on any number of ranks, and so is every step after a resume: the state
is one entry, the same on all ranks, which any number of them may load.

torchtitan finds documents where positions are 0, and that is where each document of a packed row begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from penstock.plan import Plan, load_plan
from penstock.pytorch import DataLoader

_INPUTS = {"input": "input_ids", "positions": "position_ids"}


class PlanDataLoader(BaseDataLoader):
    """Micro-batches of a plan, for this data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Which plan, and how it is read."""

        plan: str = ""
        """File with what `plan.to_toml()` gives: packed rows, without a batch, which torchtitan decides."""
        allow_code: list[str] = field(default_factory=list)
        """Packages whose functions the plan may map."""
        infinite: bool = True
        """Epoch after epoch; else one, whose last batch has rows without targets if need be. The validator sets it."""
        num_workers: int | None = None
        """Threads or processes that compute ahead; None is what `penstock.DataLoader` takes."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        rows = load_plan(config.plan, allow_code=config.allow_code)
        _check_rows(rows, seq_len)
        plan = rows.batch(local_batch_size * dp_world_size, tail="carry" if config.infinite else "pad")
        options: dict[str, Any] = {} if config.num_workers is None else {"num_workers": config.num_workers}
        epochs = None if config.infinite else 1
        self._loader = DataLoader(plan, rank=dp_rank, world_size=dp_world_size, epochs=epochs, **options)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """(inputs, labels) of one micro-batch after another."""
        for batch in self._loader:
            yield {name: batch[column] for name, column in _INPUTS.items()}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        """One entry, the same on all ranks: micro-batches that the trainer took."""
        return {"penstock": json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the next row, with any number of ranks; a checkpoint without data is one of the model alone."""
        if state_dict:
            self._loader.load_state_dict(json.loads(state_dict["penstock"]))

    def close(self) -> None:
        """Stop what computes ahead."""
        self._loader.close()


def _check_rows(rows: Plan, seq_len: int) -> None:
    """Raise `ValueError` unless the trainer can take these rows."""
    row = rows.batch(1).read_at(0)
    if missing := [column for column in (*_INPUTS.values(), "labels") if column not in row]:
        raise ValueError(
            f"The plan's rows have no {', '.join(missing)}; torchtitan takes packed rows: .pack({seq_len})."
        )
    if (length := row["input_ids"].shape[1]) != seq_len:
        raise ValueError(
            f"The plan's rows have {length:,} tokens, but training.seq_len is {seq_len:,}: .pack({seq_len})."
        )
    if any(getattr(stage, "positions", None) == "continue" for stage in rows.stages):
        raise ValueError("torchtitan finds documents where positions are 0: pack with positions='restart'.")
