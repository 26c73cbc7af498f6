"""What `penstock inspect` gathers about a dataset; with `--decode`, its tokens are text."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.dataset import foreign_files, open_folder
from penstock.errors import IncompleteDataset, PenstockError, counted, printable
from penstock.plan import open_dataset
from penstock.preparation import find_unfinished, is_stale
from penstock.report import Histogram, histogram
from penstock.schema import Column
from penstock.shards import (
    Manifest,
    ShardFolder,
    Storage,
    guess_files_format,
    index_tars,
    tokenizers_of,
)
from penstock.transforms import Tokenize, find_decoder

_CHUNK = 1 << 22
_SHOWN_ITEMS = 12
_SHOWN_BYTES = 48
_SHOWN_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A dataset in numbers and a few samples."""

    path: Path | str
    """The folder, the URL, or the files of another program."""
    storage: Storage
    num_files: int
    is_foreign: bool
    """Whether another program wrote it, so that nothing can be checked."""
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
        storage = self.storage
        provenance = storage.manifest.provenance if isinstance(storage, ShardFolder) else None
        return {
            "path": str(self.path),
            "fingerprint": storage.fingerprint,
            "columns": storage.schema.shown.to_json(),
            "samples": storage.num_samples,
            "shards": self.num_files,
            "bytes": storage.num_bytes,
            "checksums": not self.is_foreign,
            "attributes": dict(storage.attributes),
            "provenance": provenance.name if provenance is not None else None,
            "lengths": {name: lengths.to_json() for name, lengths in self.histograms.items()},
            "first_samples": list(self.samples),
            "staleness": self.staleness,
            "unfinished": self.unfinished,
        }


def describe(
    path: Path | str, *, num_samples: int, looks_at_sources: bool, on_progress: Callable[[int, int], None] | None = None
) -> Description:
    """Gather the description of the dataset at `path`; only offsets and a few samples are read.

    At a URL no offsets are, so there are no histograms of lengths: they would have everything fetched.

    Of tars, an index is made if there is none; `on_progress` is called with (bytes done, bytes in all). Nothing outside
    the folder is accessed, whatever the dataset names, except its sources if requested.

    Raises:
        IncompleteDataset: there is none; the message says how far its preparation got, if one was started.
    """
    given = str(path.absolute() if isinstance(path, Path) else path)
    kind = guess_files_format(given)
    if kind is not None:
        if kind == "tar" and isinstance(path, Path):
            index_tars([given], on_progress)
        dataset = open_dataset(path, on_error="skip")
        files = foreign_files(dataset.storage)
        return _gather(path, dataset.storage, num_samples, num_files=len(files), is_foreign=True)
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
    decoder = find_decoder(tokenizer, {} if tokenizer is not None else tokenizers_of(description.storage.attributes))
    if decoder is None:
        return description
    folder = description.storage
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
    found = _gather(path, folder, num_samples, num_files=len(folder.manifest.shards), is_foreign=False)
    unfinished = find_unfinished(path) if isinstance(path, Path) else None
    return replace(
        found,
        staleness=_staleness(path, folder.manifest) if looks_at_sources and isinstance(path, Path) else None,
        unfinished=None if unfinished is None else str(unfinished),
    )


def _gather(path: Path | str, storage: Storage, num_samples: int, *, num_files: int, is_foreign: bool) -> Description:
    columns = storage.schema.shown.columns
    is_here = not isinstance(storage, ShardFolder) or storage.supply is None
    measured = [column for column in columns if column.is_ragged and is_here]  # else all is fetched
    shown = range(min(num_samples, storage.num_samples))
    return Description(
        path=path,
        storage=storage,
        num_files=num_files,
        is_foreign=is_foreign,
        histograms={column.name: histogram(_lengths(storage, column)) for column in measured},
        samples=tuple({c.name: _preview(c, storage.value(c, index)) for c in columns} for index in shown),
    )


def _staleness(path: Path, manifest: Manifest) -> str | None:
    if "preparation" not in manifest.attributes:
        return None
    try:
        return str(is_stale(path))
    except (OSError, PenstockError, ValueError) as error:  # the sources may be on another machine
        return f"could not be checked ({error})"


def _lengths(folder: Storage, column: Column) -> Iterator[NDArray[np.int64]]:
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
    made_with = tokenizers_of(description.storage.attributes)
    if not made_with or Tokenize(tokenizer).attributes["tokenizer"]["sha256"] in made_with:
        return ""
    return f" [made with another tokenizer: {next(iter(made_with.values()))}]"
