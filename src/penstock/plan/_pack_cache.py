"""Where row counts come from: the dataset, the user's cache folder, or counting now.

A dataset prepared with `pack=` has them in its manifest. Otherwise they are counted when a plan is packed, and above
4 M documents kept in the user's cache folder, if nobody else can write to it: one small file per dataset and packing,
written once, under a lock, and checked by its digest when read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import FormatError
from penstock.identity import digest
from penstock.packing import PACKING_VERSION, PackIndex, PackingSettings, ReadLengths, build_pack_index, index_name

logger = logging.getLogger(__name__)

_WORTH_KEEPING = 4 << 20  # below this many documents counting is faster than finding the file


def find_pack_index(
    read_lengths: ReadLengths,
    num_documents: int,
    settings: PackingSettings,
    *,
    column: str,
    fingerprint: str,
    attributes: Mapping[str, Any],
) -> PackIndex:
    """The index: from the dataset's `attributes`, from the cache, or counted now and kept."""
    name = index_name(column, settings)
    stored = attributes.get("packing")
    # Appending to a dataset leaves counts of fewer samples behind.
    is_of_all = isinstance(stored, dict) and stored.get("samples", num_documents) == num_documents
    if isinstance(stored, dict) and is_of_all and stored.get("version") == PACKING_VERSION:
        indexes = stored.get("indexes")
        if isinstance(indexes, dict) and name in indexes:
            return _from_dataset(indexes[name], num_documents, name)
    folder = cache_folder()
    if num_documents < _WORTH_KEEPING or folder is None:
        return build_pack_index(read_lengths, num_documents, settings)
    key = digest(f"{fingerprint} {name} {PACKING_VERSION}")
    path = Path(os.path.realpath(folder)) / f"{key}.json"

    def count() -> PackIndex:
        logger.info("Counting rows of %d tokens in %d documents; kept in %s", settings.length, num_documents, path)
        return build_pack_index(read_lengths, num_documents, settings)

    return _from_cache(path, num_documents, count)


def cache_folder() -> Path | None:
    """Where row counts are kept; None for a user without a home.

    By hand: platformdirs took 3 to 7 ms to import, more than all else that opens a packed plan.
    """
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    base = next(filter(os.path.isabs, (given, home)), None)  # XDG says to ignore relative paths
    return None if base is None else Path(base, "penstock", "packing")


def _make_folder(folder: Path) -> None:
    """Make the cache folder.

    Raises:
        PermissionError: other users could have put files there that are read, or links that redirect what is written.
    """
    from penstock.compiled import check_trusted

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
