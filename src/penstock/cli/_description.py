"""What `penstock inspect` gathers and how it prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import IncompleteDataset, PenstockError, counted, printable
from penstock.preparation import find_unfinished, is_stale, part_of_recipe
from penstock.report import Histogram, console, format_bytes, histogram
from penstock.schema import Column
from penstock.shards import Manifest, ShardFolder

_CHUNK = 1 << 22
_SHOWN_ITEMS = 12
_SHOWN_BYTES = 48
_SHOWN_ATTRIBUTE = 200
_HASH = re.compile("[0-9a-f]{32,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A dataset in numbers and a few samples."""

    path: Path
    manifest: Manifest
    histograms: Mapping[str, Histogram]
    samples: tuple[Mapping[str, str], ...]
    staleness: str | None = None
    """Whether the sources have changed since, in words; None when nobody asked, or there are none."""
    unfinished: str | None = None
    """How far a preparation has come that the next run would continue, in words; None when there is none."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "fingerprint": manifest.fingerprint,
            "columns": manifest.schema.shown.to_json(),
            "samples": manifest.num_samples,
            "shards": len(manifest.shards),
            "bytes": manifest.num_bytes,
            "attributes": dict(manifest.attributes),
            "provenance": manifest.provenance.name if manifest.provenance is not None else None,
            "lengths": {name: lengths.to_json() for name, lengths in self.histograms.items()},
            "first_samples": list(self.samples),
            "staleness": self.staleness,
            "unfinished": self.unfinished,
        }


def describe(path: Path, *, num_samples: int, looks_at_sources: bool) -> Description:
    """Gather the description of the dataset at `path`; only offsets and a few samples are read.

    Nothing outside the folder is looked at, whatever the dataset names, except its sources if that is asked for.

    Raises:
        IncompleteDataset: there is none; says how far its preparation got, if one was started.
    """
    try:
        return _describe(path, num_samples, looks_at_sources)
    except IncompleteDataset as error:
        if unfinished := find_unfinished(path):
            raise IncompleteDataset(
                f"{path}: no dataset yet, but an unfinished preparation: {unfinished}. If it is not running, the same "
                "`penstock prepare` command goes on from there."
            ) from error
        raise


def _describe(path: Path, num_samples: int, looks_at_sources: bool) -> Description:
    folder = ShardFolder(path.absolute(), io="auto", check="window")
    columns = folder.schema.shown.columns
    histograms = {column.name: histogram(_lengths(folder, column)) for column in columns if column.is_ragged}
    shown = range(min(num_samples, folder.num_samples))
    samples = tuple({c.name: _preview(c, folder.value(c, index)) for c in columns} for index in shown)
    unfinished = find_unfinished(path)
    return Description(
        path=path,
        manifest=folder.manifest,
        histograms=histograms,
        samples=samples,
        staleness=_staleness(path, folder.manifest) if looks_at_sources else None,
        unfinished=None if unfinished is None else str(unfinished),
    )


def print_description(description: Description) -> None:
    """Print for people."""
    out, manifest = console(), description.manifest
    out.print(str(description.path), style="bold", end="")
    out.print(f"   fingerprint {manifest.fingerprint}")
    size = format_bytes(manifest.num_bytes)
    out.print(f"{counted(manifest.num_samples, 'sample')} in {counted(len(manifest.shards), 'shard')}, {size}\n")
    if description.staleness is not None:
        out.print(f"Sources: {description.staleness}\n")
    elif description.unfinished is not None:
        out.print(f"A preparation can be continued: {description.unfinished}\n")
    for column in manifest.schema.shown.columns:
        out.print(f"  {printable(column.name):<20} {column.spec:<20} {_size(manifest, column)}")
    if manifest.attributes:
        out.print()
    for key, value in manifest.attributes.items():
        out.print(f"  {printable(key):<20} {_shorten(printable(_in_words(value)))}")
    for line in _partly(manifest.attributes):
        out.print(f"  {printable(line)}")
    if _lets_text_control(manifest.attributes.get("tokenizer")):
        out.print(
            "  Special tokens that a text spells out are control tokens in this dataset (special_tokens='allow')."
        )
    for name, lengths in description.histograms.items():
        out.print(
            f"\nLengths of {printable(name)}: {lengths.shortest:,} to {lengths.longest:,}, mean {lengths.mean:,.1f}"
        )
        for line in lengths.lines():
            out.print(line)
    for index, sample in enumerate(description.samples):
        out.print(f"\nSample {index}")
        for name, preview in sample.items():
            out.print(f"  {printable(name):<20} {preview}")


def _partly(attributes: Mapping[str, Any]) -> Iterator[str]:
    """What to know of a dataset that does not hold all samples of its sources."""
    preparation = attributes.get("preparation")
    recipe = preparation.get("recipe") if isinstance(preparation, Mapping) else None
    if not isinstance(recipe, Mapping):
        return
    part, limit = part_of_recipe(recipe), recipe.get("limit")
    if part is not None:
        by = part.by if isinstance(part.by, str) else ", ".join(part.by)
        shares = ", ".join(f"{name} {100 * share:g} %" for name, share in part.parts)
        yield f"Part {part.name!r} of a split by {by} with seed {part.seed}: {shares}."
    if type(limit) is int:
        yield f"A trial: at most the first {counted(limit, 'sample')} of the sources."


def _lets_text_control(tokenizer: Any) -> bool:
    """Whether special tokens were taken from the text; datasets from before there was a choice do not say so."""
    if not isinstance(tokenizer, Mapping) or tokenizer.get("kind") not in ("json", "tiktoken"):
        return False
    return bool(tokenizer.get("special_tokens", "allow") == "allow")


def _in_words(value: Any) -> str:
    """JSON on one line for people: empty values are left out, hashes are cut short."""
    if isinstance(value, Mapping):
        present = {key: part for key, part in value.items() if part not in (None, {}, [], "")}
        parts = [
            f"{key} ({_in_words(part)})" if isinstance(part, Mapping) else f"{key} {_in_words(part)}"
            for key, part in present.items()
        ]
        return ", ".join(parts) if parts else "nothing"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_words, value))}]"
    if isinstance(value, str):
        return f"{value[:12]}…" if _HASH.fullmatch(value) else value
    return f"{value:,}" if type(value) is int else str(value)


def _shorten(text: str) -> str:
    if len(text) <= _SHOWN_ATTRIBUTE:
        return text
    return f"{text[:_SHOWN_ATTRIBUTE]} … ({len(text):,} characters; --json shows all)"


def _staleness(path: Path, manifest: Manifest) -> str | None:
    if "preparation" not in manifest.attributes:
        return None
    try:
        return str(is_stale(path))
    except (OSError, PenstockError, ValueError) as error:  # the sources may be on another machine
        return f"could not be checked ({error})"


def _size(manifest: Manifest, column: Column) -> str:
    if not column.is_ragged:
        return format_bytes(column.item_bytes * manifest.num_samples)
    count = sum(shard.num_values[column.name] for shard in manifest.shards)
    return f"{format_bytes(count * column.item_bytes)}, {count:,} values"


def _lengths(folder: ShardFolder, column: Column) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, folder.num_samples, _CHUNK):
        yield folder.lengths(column, begin, min(begin + _CHUNK, folder.num_samples))


def _preview(column: Column, value: NDArray[Any]) -> str:
    if column.kind == "bytes":
        raw = value[:_SHOWN_BYTES].tobytes()
        return f"{raw!r}{' …' if len(value) > _SHOWN_BYTES else ''} ({len(value):,} bytes)"
    items = value.reshape(-1)
    shown = " ".join(str(item) for item in items[:_SHOWN_ITEMS].tolist())
    shape = f" {list(value.shape)}" if value.ndim else ""
    return f"{shown}{' …' if items.size > _SHOWN_ITEMS else ''}{shape}"
