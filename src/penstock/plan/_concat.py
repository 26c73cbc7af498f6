"""`penstock.concat`: several datasets, one after the other."""

from __future__ import annotations

from penstock.plan._dataset import Dataset
from penstock.samples import JoinedLocation, check_concat


def concat(*datasets: Dataset, different_tokenizers: bool = False) -> Dataset:
    """The samples of several datasets with the same columns, one dataset after the other. Nothing is copied.

    Args:
        datasets: In the order of their samples. For fixed shares of each, use `mix`.
        different_tokenizers: Take datasets whose token ids mean different things, which is refused otherwise.

    Raises:
        SchemaError: they have different columns.
        ValueError: tokens or labels mean different things in them.

    >>> import numpy as np, penstock
    >>> a, b = (penstock.from_arrays({"x": np.arange(size)}) for size in (3, 2))
    >>> penstock.concat(a, b)[:]["x"].tolist()
    [0, 1, 2, 0, 1]
    """
    for number, dataset in enumerate(datasets):
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"concat(): argument {number} is {type(dataset).__name__}; give datasets, as in concat(a, b) or "
                "concat(*datasets)."
            )
    check_concat(datasets, different_tokenizers)
    return Dataset(JoinedLocation("concat", datasets))
