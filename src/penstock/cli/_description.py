"""What `penstock inspect` gathers about a dataset; with `--decode`, its tokens are text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import open_folder
from penstock.errors import IncompleteDataset, PenstockError, counted, printable
from penstock.preparation import find_unfinished, is_stale
from penstock.report import Histogram, histogram
from penstock.schema import Column
from penstock.shards import Manifest, ShardFolder, tokenizers_of
from penstock.transforms import Tokenize, find_decoder

_CHUNK = 1 << 22
_SHOWN_ITEMS = 12
_SHOWN_BYTES = 48
_SHOWN_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A dataset in numbers and a few samples."""

    path: Path | str
    """The folder, or the URL."""
    manifest: Manifest
    histograms: Mapping[str, Histogram]
    samples: tuple[Mapping[str, str], ...]
    staleness: str | None = None
    """Whether the sources have changed since, in words; None if not requested, or there are none."""
    unfinished: str | None = None
    """How far an unfinished preparation that the next run would continue has come, in words; None if there is none."""
    is_decoded: bool = False
    """Whether tokens in the samples are shown as text."""

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


def describe(path: Path | str, *, num_samples: int, looks_at_sources: bool) -> Description:
    """Gather the description of the dataset at `path`; only offsets and a few samples are read.

    At a URL no offsets are, so there are no histograms of lengths: they would have everything fetched.

    Nothing outside the folder is accessed, whatever the dataset names, except its sources if requested.

    Raises:
        IncompleteDataset: there is none; the message says how far its preparation got, if one was started.
    """
    try:
        return _describe(path, num_samples, looks_at_sources)
    except IncompleteDataset as error:
        if isinstance(path, Path) and (unfinished := find_unfinished(path)):
            raise IncompleteDataset(
                f"{path}: no dataset yet, but an unfinished preparation: {unfinished}. If it is not running, the same "
                "`penstock prepare` command continues it."
            ) from error
        raise


def with_texts(description: Description, tokenizer: str | None) -> Description:
    """The description with columns of tokens shown as text; a note says if they were made by another tokenizer.

    Without a tokenizer nothing changes, unless tokens are bytes, which need none.

    Raises:
        ValueError: a tokenizer is given, but the dataset has no column of tokens.
    """
    decoder = find_decoder(tokenizer, {} if tokenizer is not None else tokenizers_of(description.manifest.attributes))
    if decoder is None:
        return description
    folder = open_folder(description.path)
    columns = [one for one in folder.schema.shown.columns if one.kind == "ragged" and one.dtype.kind in "iu"]
    columns = [one for one in columns if not one.shape]
    if not columns:
        raise ValueError(f"{description.path}: no column of tokens to decode; the columns are {folder.schema.shown}.")
    note = "" if tokenizer is None else _difference(description, tokenizer)
    texts = []
    for index, sample in enumerate(description.samples):
        shown = dict(sample)
        for column in columns:
            tokens = folder.value(column, index)
            text = printable(decoder(tokens[:_SHOWN_TOKENS]))
            more = " …" if len(tokens) > _SHOWN_TOKENS else ""
            shown[column.name] = f"{text}{more} ({len(tokens):,} tokens){note}"
        texts.append(shown)
    return replace(description, samples=tuple(texts), is_decoded=True)


def _describe(path: Path | str, num_samples: int, looks_at_sources: bool) -> Description:
    folder = open_folder(path)
    columns = folder.schema.shown.columns
    measured = [column for column in columns if column.is_ragged and folder.supply is None]  # else all is fetched
    histograms = {column.name: histogram(_lengths(folder, column)) for column in measured}
    shown = range(min(num_samples, folder.num_samples))
    samples = tuple({c.name: _preview(c, folder.value(c, index)) for c in columns} for index in shown)
    unfinished = find_unfinished(path) if isinstance(path, Path) else None
    return Description(
        path=path,
        manifest=folder.manifest,
        histograms=histograms,
        samples=samples,
        staleness=_staleness(path, folder.manifest) if looks_at_sources and isinstance(path, Path) else None,
        unfinished=None if unfinished is None else str(unfinished),
    )


def _staleness(path: Path, manifest: Manifest) -> str | None:
    if "preparation" not in manifest.attributes:
        return None
    try:
        return str(is_stale(path))
    except (OSError, PenstockError, ValueError) as error:  # the sources may be on another machine
        return f"could not be checked ({error})"


def _lengths(folder: ShardFolder, column: Column) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, folder.num_samples, _CHUNK):
        yield folder.lengths(column, begin, min(begin + _CHUNK, folder.num_samples))


def _preview(column: Column, value: Any) -> str:
    if column.kind == "byte_strings":
        sizes = ", ".join(f"{size:,}" for size in value.lengths[:_SHOWN_ITEMS].tolist())
        more = ", …" if len(value) > _SHOWN_ITEMS else ""
        return f"{counted(len(value), 'byte string')}" + (f" of {sizes}{more} bytes" if len(value) else "")
    if column.kind == "bytes":
        raw = value[:_SHOWN_BYTES].tobytes()
        return f"{raw!r}{' …' if len(value) > _SHOWN_BYTES else ''} ({counted(len(value), 'byte')})"
    items = value.reshape(-1)
    shown = " ".join(str(item) for item in items[:_SHOWN_ITEMS].tolist())
    shape = f" {list(value.shape)}" if value.ndim else ""
    return f"{shown}{' …' if items.size > _SHOWN_ITEMS else ''}{shape}"


def _difference(description: Description, tokenizer: str) -> str:
    made_with = tokenizers_of(description.manifest.attributes)
    if not made_with or Tokenize(tokenizer).attributes["tokenizer"]["sha256"] in made_with:
        return ""
    return f" [made with another tokenizer: {next(iter(made_with.values()))}]"
