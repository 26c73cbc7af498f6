"""Which number means which class, consistently across datasets that are prepared separately.

The label of an image is its class folder's place among all classes. Without a list, these are the folders found,
sorted: a validation set that lacks a class would number the later ones differently. So the list is kept in the
dataset, and can be given to the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import FormatError
from penstock.filesystem import local_path, read_small, similar_path
from penstock.shapes import misfit
from penstock.shards import classes_of, read_manifest
from penstock.sources import SourceFile

_MAX_BYTES = 64 << 20

Classes = Sequence[str] | str | os.PathLike[str]
"""Names in the order of their numbers, a file with one per line (or a JSON list), or a dataset that has them."""


def read_classes(classes: Classes) -> tuple[str, ...]:
    """The names.

    Raises:
        FileNotFoundError: no such file or dataset.
        FormatError: the file or the dataset has no classes.
    """
    if not isinstance(classes, (str, os.PathLike)):
        return tuple(classes)
    path = local_path(classes, "a list of classes")
    if path.is_dir():
        names = classes_of(read_manifest(path).attributes)
        what = "was not prepared from class folders, so it has no classes"
    elif path.is_file():
        names, what = _read_file(path), "names no class; write one per line, or a JSON list of them"
    else:
        raise FileNotFoundError(f"{path}: no such file or dataset to take classes from.{similar_path(path)}")
    if not names:
        raise FormatError(f"{path} {what}.")
    return names


def _read_file(path: Path) -> tuple[str, ...]:
    try:
        text = read_small(path, _MAX_BYTES).decode()
        if path.suffix != ".json":
            return tuple(line for line in text.splitlines() if line.strip())
        names = json.loads(text)
        json.dumps(names, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not a list of classes: {error}.") from None
    if wrong := misfit(names, [str], "the list"):
        raise FormatError(f"{path} is not a list of classes: {wrong}.")
    return tuple(names)


def check_used(classes: tuple[str, ...] | None, found: tuple[str, ...], files: Sequence[SourceFile]) -> None:
    """Refuse a list of classes if no source has any.

    Raises:
        ValueError: it is of no use; the message names the first source.
    """
    if classes is not None and files and not found:
        raise ValueError(
            f"classes={classes!r:.80}, but no source is an image in a class folder ({files[0].path}). Leave it out."
        )
