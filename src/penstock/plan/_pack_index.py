"""How many rows each window of a packed plan has: from the dataset, the user's cache folder, or counted now.

A dataset prepared with `pack=` has the counts in its manifest. Otherwise they are counted when a plan is packed, and
above 4 M documents kept in the user's cache folder, if nobody else can write to it: one small file per dataset and
packing, written once, under a lock, and checked by its digest when read.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import Samples, packed_column, sample_layers
from penstock.errors import FormatError, SchemaError, StageError
from penstock.filesystem import check_trusted, user_cache
from penstock.identity import digest
from penstock.packing import PACKING_VERSION, PackIndex, build_pack_index, index_name
from penstock.plan._epochs import lane_edges
from penstock.plan._stages import Pack, Shuffle

logger = logging.getLogger(__name__)

_MOST_AMOUNT = 2**40
_WORTH_KEEPING = 4 << 20  # below this many documents counting is faster than finding the file


def find_pack_index(samples: Samples, stage: Pack, shuffle: Shuffle | None) -> PackIndex:
    """The index; with lanes, each window is what is in one shard.

    Raises:
        SchemaError: a column has neither a whole number nor a length for each document.
        StageError: counting would have a remote dataset fetched.
    """
    packed_column(samples.schema, stage.column)
    num_documents, settings = len(samples), stage.settings
    layers = sample_layers(samples, (stage.column,))
    edges = lane_edges(shuffle, layers, num_documents)
    name = index_name(" ".join(stage.counted), settings, by_shard=edges is not None)
    stored = samples.storage.attributes.get("packing") if samples.are_whole else None
    # Appending to a dataset leaves counts of fewer samples behind.
    is_of_all = isinstance(stored, dict) and stored.get("samples", num_documents) == num_documents
    if isinstance(stored, dict) and is_of_all and stored.get("version") == PACKING_VERSION:
        indexes = stored.get("indexes")
        if isinstance(indexes, dict) and name in indexes:
            found = _from_dataset(indexes[name], num_documents, name)
            if edges is None or np.array_equal(found.window_starts, edges):
                return found
    is_remote = any(layer.folder.supply is not None for layer in layers)
    read = functools.partial(_refuse_counting, stage) if is_remote else functools.partial(read_costs, samples, stage)
    count = functools.partial(build_pack_index, read, num_documents, settings, edges)
    folder = cache_folder()
    if num_documents < _WORTH_KEEPING or folder is None:
        return count()
    key = digest(f"{samples.fingerprint} {name} {PACKING_VERSION}")
    return _from_cache(Path(os.path.realpath(folder)) / f"{key}.json", num_documents, count)


def _refuse_counting(stage: Pack, begin: int, end: int) -> NoReturn:
    """In place of reading lengths: it would have a whole remote dataset fetched."""
    length = stage.settings.length
    raise StageError(
        f"pack({length}): counting its rows takes the lengths of all documents, so the whole dataset would be fetched "
        f"first. Prepare it with pack={length} (`penstock prepare --pack {length}`), which stores the number of rows, "
        "or stage it on this node."
    )


def read_costs(samples: Samples, stage: Pack, begin: int, end: int) -> NDArray[np.int64]:
    """Lengths of documents `begin` to `end`; with limits, what they take of each budget.

    Raises:
        SchemaError: a column has neither a whole number nor a length for each document.
    """
    first = samples.schema[stage.counted[0]]
    if first.is_ragged and len(stage.counted) == 1:
        return samples.lengths_between(first, begin, end)
    documents = np.arange(begin, end)
    found = [amounts_of(samples, name, documents) for name in stage.counted]
    return found[0] if len(found) == 1 else np.stack(found, axis=1)


def amounts_of(samples: Samples, name: str, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of a budget each of these documents takes."""
    column, stored = samples.schema[name], samples.locate(documents)
    if column.is_ragged:
        return samples.storage.lengths_of(column, stored)
    if column.shape or column.dtype.kind not in "iu":
        raise SchemaError(
            f"pack(): column {name!r} is {column.spec}; a budget needs a whole number for each document, or lengths."
        )
    amounts = np.empty(len(stored), column.dtype)
    samples.storage.read_fixed(column, stored, amounts)
    if amounts.size and (amounts.min() < 0 or amounts.max() > _MOST_AMOUNT):
        wrong = documents[(amounts < 0) | (amounts > _MOST_AMOUNT)][0]
        raise FormatError(f"Column {name!r} of sample {wrong:,} is not a number from 0 to {_MOST_AMOUNT:,}.")
    return amounts.astype(np.int64)


def cache_folder() -> Path | None:
    """Where row counts are kept; None for a user without a home."""
    return user_cache("packing")


def _make_folder(folder: Path) -> None:
    """Make the cache folder.

    Raises:
        PermissionError: other users could have put files there that are read, or links that redirect what is written.
    """
    check_trusted(folder, Path(__file__))
    folder.mkdir(parents=True, exist_ok=True)
    check_trusted(folder, Path(__file__))


def _from_dataset(fields: Any, num_documents: int, name: str) -> PackIndex:
    try:
        return PackIndex.from_json(fields, num_documents)
    except ValueError as error:
        raise FormatError(
            f"The packing {name!r} stored with the dataset is not of its {num_documents:,} documents: {error}. "
            "Prepare the dataset again."
        ) from None


def _from_cache(path: Path, num_documents: int, build: Callable[[], PackIndex]) -> PackIndex:
    """One process of the machine builds, the others wait for it; a damaged file is built again."""
    with contextlib.ExitStack() as stack:
        try:
            _make_folder(path.parent)
            with contextlib.suppress(OSError, ValueError):
                return _load(path, num_documents)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("Row counts are not kept, %s cannot be used: %s", path.parent, error)
            return build()
        try:
            return _load(path, num_documents)
        except (OSError, ValueError):
            logger.info("Counting rows in %d documents; kept in %s", num_documents, path)
            index = build()
            _keep(path, index)
            return index


def _keep(path: Path, index: PackIndex) -> None:
    text = json.dumps(index.to_json())
    working = path.with_suffix(f".{os.getpid()}")
    try:
        working.write_text(f"{digest(text, 8)}\n{text}")
        os.replace(working, path)
    except OSError as error:
        logger.warning("Row counts are not kept, %s cannot be written: %s", path, error)
        working.unlink(missing_ok=True)


def _load(path: Path, num_documents: int) -> PackIndex:
    kept, _, text = path.read_text().partition("\n")
    if digest(text, 8) != kept:
        raise ValueError(f"{path} is damaged")
    return PackIndex.from_json(json.loads(text), num_documents)
