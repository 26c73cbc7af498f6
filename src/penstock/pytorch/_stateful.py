"""State of iterable datasets: of their iterator if it has any to give, else of the dataset itself.

One that has neither is read again from its beginning, and what was handed over is passed over: exact for
datasets that yield the same again, with the same seeds, and as slow as reading is.
"""

from __future__ import annotations

import pickle
from typing import Any

from penstock.errors import StateError

WorkerState = bytes | int | None
"""Where a worker's iteration stands: pickled, or as many batches as it gave, or at the beginning."""


def has_state(value: Any) -> bool:
    """Whether it can say where it stands and go on from there."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def iteration_state(dataset: Any, iterator: Any) -> bytes | None:
    """Where an iteration stands, pickled, because the dataset goes on with the original; None when it cannot say."""
    if has_state(iterator):
        return pickle.dumps({"iterator": iterator.state_dict()})
    if has_state(dataset):
        return pickle.dumps({"dataset": dataset.state_dict()})
    return None


def load_dataset_state(dataset: Any, state: dict[str, Any]) -> None:
    """What there is to restore before the dataset's iterator is made."""
    if "dataset" in state:
        _check(dataset, "dataset")
        dataset.load_state_dict(state["dataset"])


def load_iterator_state(iterator: Any, state: dict[str, Any]) -> None:
    """What there is to restore after the dataset's iterator was made."""
    if "iterator" in state:
        _check(iterator, "iterator")
        iterator.load_state_dict(state["iterator"])


def _check(value: Any, role: str) -> None:
    if not has_state(value):
        raise StateError(
            f"The state was saved with a dataset whose {role} has load_state_dict(); {type(value).__name__} has none."
        )
