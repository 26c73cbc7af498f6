"""Whether batches are mixed as a full shuffle would mix them, measured on the data.

A windowed shuffle mixes `group` storage windows at a time. If samples of one class, or of one source, are stored next
to each other, a batch then holds the classes of those windows only. A loss curve shows it too late, so it is
measured: batches are drawn as the shuffle would draw them, and the variance of their class counts is
compared with that of batches drawn from everything. 1 is a full shuffle.

    what is counted    a column that labels have (`label`, `domain`, …); without one, the files that samples came from,
                       taken together when their paths differ in nothing but digits
    what it costs      64 samples of that column where nothing is stored in runs, some thousands where something is
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import ConcatStorage, Samples
from penstock.order import WindowedOrder
from penstock.plan._accounts import COUNTED_BATCH as _BATCH
from penstock.plan._accounts import Mixing
from penstock.plan._epochs import Epochs
from penstock.schema import LABEL_COLUMNS
from penstock.shards import ORIGIN_COLUMN, Storage, hash_samples, read_samples

Classes = Callable[[NDArray[np.int64]], NDArray[np.uint64]]
"""The class of each stored sample, as a number."""

_PAIRS, _BATCHES = 32, 32
_IN_RUNS = 0.25
_MOST_FILES = 4096
_SEED = 0


def measure_mixing(samples: Samples, epochs: Epochs, window_starts: NDArray[np.int64]) -> list[Mixing]:
    """How samples are mixed; nothing when nothing is stored in runs, or the shuffle reaches everything at once.

    Args:
        samples: The samples.
        epochs: The order of storage windows.
        window_starts: The first sample of each storage window; the last entry is the number of samples.
    """
    if len(epochs.rows_per_window) <= epochs.group or epochs.shuffle is None or epochs.shuffle.mode == "full":
        return []
    found = _classes_of(samples)
    if found is None:
        return []
    what, classes = found
    rng = np.random.default_rng(_SEED)
    if not _comes_in_runs(samples, classes, window_starts, rng):
        return []
    order = epochs.order(0)
    assert isinstance(order, WindowedOrder)
    groups = np.linspace(0, order.num_groups - 1, _BATCHES).round().astype(np.int64).tolist()
    drawn = np.stack([_draw(order.windows_of_group(group), window_starts, rng) for group in groups])
    _, numbers = np.unique(classes(samples.locate(drawn.reshape(-1))), return_inverse=True)
    return [_compare(what, numbers.reshape(drawn.shape))]


def _compare(what: str, batches: NDArray[np.int64]) -> Mixing:
    counts = np.stack([np.bincount(batch, minlength=int(batches.max()) + 1) for batch in batches])
    shares = counts.mean(axis=0) / _BATCH
    expected = float((_BATCH * shares * (1 - shares)).sum())
    variance = float(counts.var(axis=0, ddof=1).sum()) / expected if expected else 1.0
    return Mixing(what, float((counts > 0).sum(axis=1).mean()), variance)


def _draw(windows: NDArray[np.int64], starts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A batch of samples from these windows, as a permutation of all of them gives it."""
    ends = np.cumsum(starts[windows + 1] - starts[windows])
    places = rng.integers(0, max(1, int(ends[-1])), _BATCH)
    found = np.searchsorted(ends, places, side="right")
    return np.asarray(starts[windows[found] + 1] - (ends[found] - places), np.int64)


def _comes_in_runs(samples: Samples, classes: Classes, starts: NDArray[np.int64], rng: np.random.Generator) -> bool:
    """Whether two samples of one storage window are alike far more often than two of different ones."""
    windows = rng.integers(0, len(starts) - 1, _PAIRS)
    pairs = starts[windows, None] + (rng.random((_PAIRS, 2)) * (starts[windows + 1] - starts[windows])[:, None])
    indices = np.minimum(pairs.astype(np.int64), len(samples) - 1)
    one, other = classes(samples.locate(indices.reshape(-1))).reshape(_PAIRS, 2).T
    within, across = float((one == other).mean()), float((one[:, None] == other).mean())
    return within - across > _IN_RUNS


def _classes_of(samples: Samples) -> tuple[str, Classes] | None:
    """What to count, in words, and how to read it."""
    storage = samples.storage
    columns = (storage.schema[name] for name in LABEL_COLUMNS if name in storage.schema)
    label = next((each for each in columns if each.kind == "bytes" or (each.kind == "fixed" and not each.shape)), None)
    if label is not None:
        return f"column {label.name!r}", lambda indices: hash_samples([read_samples(storage, label, indices)])
    if isinstance(storage, ConcatStorage) and len(storage.parts) > 1:
        return "which dataset of concat() a sample is from", storage.part_of
    return _sources_of(samples) if _are_worth_reading(storage) else None


def _are_worth_reading(storage: Storage) -> bool:
    """Whether there are several files, and few enough to be sources; a shuffled dataset has mixed them."""
    preparation = storage.attributes.get("preparation")
    num_files = preparation.get("files") if isinstance(preparation, dict) else None
    return type(num_files) is int and 1 < num_files <= _MOST_FILES and ORIGIN_COLUMN not in storage.schema


def _sources_of(samples: Samples) -> tuple[str, Classes] | None:
    provenance = samples.keys.provenance
    names = [re.sub(r"\d+", "", path) for path in provenance.files]
    _, numbers = np.unique(names, return_inverse=True)
    if len(names) < 2 or numbers.max() == 0 or not provenance.is_complete:
        return None
    sources = numbers.astype(np.uint64)
    return "what is in one source file", lambda indices: sources[provenance.files_of(indices)]
