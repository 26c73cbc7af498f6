"""What there is already at the destination, and whether this run may go on from it, or replace it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import DatasetExists, FormatError
from penstock.preparation._earlier import Earlier, read_earlier
from penstock.preparation._recipe import RECIPE_VERSION, Recipe, differences
from penstock.preparation._settings import Settings
from penstock.preparation._work import WorkFolder
from penstock.shards import Manifest
from penstock.sources import SourceFile, SourceOptions
from penstock.transforms import Transform


@dataclass(frozen=True, slots=True)
class Basis:
    """What this run goes on from."""

    recipe: Recipe | None
    """Recipe that is followed already; None when this run begins anew."""
    earlier: Earlier | None
    """Dataset whose tasks may be kept."""


def wanted_recipe(transform: Transform, reading: SourceOptions, settings: Settings) -> dict[str, Any]:
    """What is known of the recipe before any row was looked at."""
    origins = {} if settings.origins == "auto" else {"origins": settings.origins}
    return {
        "version": RECIPE_VERSION,
        "transform": transform.identity,
        "reading": reading.identity,
        "shard_bytes": settings.shard_bytes,
        "shuffle": settings.shuffle,
        **origins,
    }


def find_basis(
    destination: Path,
    previous: Manifest | None,
    wanted: Mapping[str, Any],
    files: Sequence[SourceFile],
    settings: Settings,
) -> Basis:
    """Decide what to go on from.

    Raises:
        DatasetExists: what is there was made in another way, and `overwrite` is not given.
    """
    overwrite = settings.overwrite
    unfinished = WorkFolder(destination).recipe()
    if previous is not None:
        earlier = _earlier(destination, previous, overwrite)
        reasons = _reasons(earlier, wanted, files, settings.pack)
        if not reasons:
            assert earlier is not None
            return Basis(earlier.recipe, earlier)
        if not overwrite:
            raise DatasetExists(_refuse(f"{destination}: the dataset there was made", reasons))
    if unfinished is not None:
        reasons = differences(unfinished, wanted)
        if not reasons:
            return Basis(Recipe.from_json(unfinished), None)
        if not overwrite and previous is None:
            raise DatasetExists(_refuse(f"{destination}: an unfinished preparation is there, made", reasons))
    return Basis(None, None)


def _earlier(destination: Path, previous: Manifest, overwrite: bool) -> Earlier | None:
    try:
        return read_earlier(destination, previous)
    except FormatError:
        if overwrite:  # what is damaged goes
            return None
        raise


def _reasons(
    earlier: Earlier | None, wanted: Mapping[str, Any], files: Sequence[SourceFile], pack: tuple[int, ...]
) -> list[str]:
    if earlier is None:
        return ["maker (it was not made by `penstock prepare`)"]
    reasons = differences(earlier.recipe.to_json(), wanted)
    if not reasons and earlier.recipe.shuffle is not None and not earlier.is_current(files):
        what = f"set of shards, of which {len(earlier.lost):,} are lost" if earlier.lost else "set of source files"
        return [
            f"{what}; with shuffle= every document's place depends on all sources, so that "
            "adding some would leave them unshuffled, and everything must be prepared again"
        ]
    if not reasons and earlier.num_added and not (earlier.is_current(files) and earlier.pack == pack):
        return [f"writer as well, which appended {earlier.num_added:,} samples that this run would drop"]
    return reasons


def _refuse(what: str, reasons: list[str]) -> str:
    return (
        f"{what} with another {'; another '.join(reasons)}. Give overwrite=True (--overwrite) to replace it, "
        "or another destination."
    )
