"""Functions that a plan file can name."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

join = os.path.join  # code of another package, within reach of this one
NOT_A_FUNCTION = 3


def jitter(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A row with noise."""
    return {key: value + rng.integers(0, 5) for key, value in row.items()}


def first_token(batch: dict[str, Any]) -> dict[str, Any]:
    """The first token of every row."""
    return {"first": batch["input_ids"][:, 0]}


class Scale:
    """A method is not a function at the top of a module, but it has a name."""

    @staticmethod
    def double(row: dict[str, Any]) -> dict[str, Any]:
        """Twice the row."""
        return {key: value * 2 for key, value in row.items()}

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


scale = Scale()
