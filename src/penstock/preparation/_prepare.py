"""`penstock.prepare`: raw data to a dataset, once.

**Classes.** The label of an image is its class folder's number among all classes. Without a list, these are the folders
found, sorted: a validation set that lacks a class would number the later ones differently. So the list is kept in the
dataset, and can be given to the next one.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from penstock.errors import FormatError, ScriptError
from penstock.filesystem import is_url, local_path, read_small, similar_path
from penstock.preparation._parts import check_destination, plan_parts
from penstock.preparation._prepared import Prepared, sum_parts
from penstock.preparation._progress import OnProgress
from penstock.preparation._run import run_all
from penstock.preparation._shipping import check_shippable, naming
from penstock.preparation._specification import EngineName, OnError, Origins, Settings
from penstock.preparation._survey import Request
from penstock.preparation._work_folder import folder_of
from penstock.shapes import find_mismatch
from penstock.shards import classes_of, read_manifest
from penstock.sources import SourceOptions
from penstock.transforms import BatchFunction, FunctionTransform, KeepColumns, Transform

_MAX_BYTES = 64 << 20

Classes = Sequence[str] | str | os.PathLike[str]
"""Names in the order of their numbers, a file with one per line (or a JSON list), or a dataset that has them."""


def prepare(
    sources: Any,
    destination: str | os.PathLike[str],
    *,
    transform: Transform | BatchFunction | str | None = None,
    reading: SourceOptions | None = None,
    classes: Classes | None = None,
    workers: int | Literal["auto"] = "auto",
    engine: EngineName = "local",
    address: str | None = None,
    shard_bytes: int = 256 << 20,
    shuffle: int | Literal["auto"] | None = "auto",
    pack: int | Sequence[int] = (),
    on_error: OnError = "raise",
    max_skipped: int | float | None = None,
    overwrite: bool = False,
    append: bool = False,
    remove: bool = False,
    split: Mapping[str, float] | None = None,
    split_seed: int = 0,
    split_by: str | Sequence[str] = "content",
    limit: int | None = None,
    origins: Origins = "auto",
    on_progress: OnProgress | None = None,
) -> Prepared:
    """Turn raw data into a dataset at `destination`. Stop it at any moment and call it again: it continues.

    To the byte, a new dataset depends only on the sources, the transform, `reading`, `shard_bytes`, `shuffle`, `split`,
    `limit` and `origins`. If the dataset already exists, made with the same settings, only new and changed source
    files are prepared, and their samples come last: the same samples as in a new dataset, in a different order.

    Args:
        sources: A path, glob, folder or URL, a list of them, or a Python iterable of rows.
        destination: Folder of the dataset, which every machine of a cluster must see; or a URL, such as
            s3://bucket/corpus: shards are sent there while later ones are made, and at most four wait for a slow
            network. What a run needs to continue is kept in ~/.cache/penstock/prepare (or $XDG_CACHE_HOME).
        transform: How rows become samples: `Tokenize(...)`, `DecodeImage(...)`, a function of a batch, or its name, as
            in "package.module:function"; None keeps the columns as they are.
        reading: How to read the sources, if their names do not say.
        classes: For images in class folders: names in the order of their labels, a file with one per line, or
            another dataset, such as the training set; by default the names of the folders, sorted.
        workers: Number of processes; "auto" is one per core that this process may use.
        engine: "local" starts processes on this machine, "ray" sends the same tasks to a cluster.
        address: Address of the Ray cluster; by default the one that this process is connected to, or a new one on this
            machine.
        shard_bytes: Size at which a shard is closed, and about the memory a worker needs; with `shuffle`, twice that.
        shuffle: Seed to permute all documents by, so that reading in order is reading at random; costs a second pass
            over the output, and disk space for it. "auto" permutes what would come class by class: class folders by
            reading their files in mixed order, which costs nothing, and large sources whose label column comes in runs
            by a second pass; None keeps the order of the sources.
        pack: Row length, or several, to count packed rows for, so that a packed plan opens at once.
        on_error: "raise" stops at the first bad row, "skip" leaves bad rows out and counts them.
        max_skipped: Most rows to skip: a number, or a share such as 0.5; by default a tenth, but at least ten rows.
        overwrite: Replace a dataset, or an unfinished one, that was made with different settings.
        append: Add to the sources that the dataset was made from, which need neither be given nor still exist.
        remove: Remove the samples of source files that are no longer given, instead of stopping.
        split: Name and share of each part, such as "val" and 0.02: each becomes a dataset in its own folder in the
            destination. The rest is "train". A sample stays in its part in later runs, too.
        split_seed: A different seed gives a different split.
        split_by: What decides a sample's part: "content", "file" (all samples of a file together), or columns.
        limit: Make at most this many samples, the first of the sources, for a trial.
        origins: Where to keep the file and row of each sample: beside the "manifest", in a "column", 16 bytes per
            sample, or "auto": in a column if neighbours come from different places.
        on_progress: Called a few times a second with a `Progress`.

    Raises:
        DatasetExists: the destination holds something that cannot be continued, and `overwrite` is not set; or samples
            of files that are no longer given, and `remove` is not set.
        NotADirectoryError: the destination is a file.
        WriterBusy: another process is writing to this destination.
        FormatError: a bad row, or too many of them; the message names file and row.
        StorageError: the disk is full or failing, or the store refuses; finished tasks are kept.
        ScriptError: workers cannot import the script that the transform is in.
        WorkerDied: the same task killed several workers.
    """
    settings = Settings(
        workers=workers,
        engine=engine,
        address=address,
        shard_bytes=shard_bytes,
        shuffle=shuffle,
        pack=(pack,) if isinstance(pack, int) else tuple(pack),
        on_error=on_error,
        max_skipped=max_skipped,
        overwrite=overwrite,
        append=append,
        remove=remove,
        limit=limit,
        origins=origins,
    )
    url = check_shippable(os.fspath(destination), settings) if is_url(destination) else None
    path = folder_of(destination)
    if path.is_file():
        raise NotADirectoryError(f"{path}: the destination is a file; give a folder, which need not exist yet.")
    request = Request(
        destination=path,
        url=url,
        sources=sources,
        transform=_as_transform(transform),
        reading=_with_classes(reading or SourceOptions(), classes),
        settings=settings,
    )
    try:
        with naming(path, url):
            return _run(request, split, split_seed, split_by, on_progress)
    except ScriptError as error:
        raise error.with_traceback(None) from None


def _run(
    request: Request,
    split: Mapping[str, float] | None,
    split_seed: int,
    split_by: str | Sequence[str],
    on_progress: OnProgress | None,
) -> Prepared:
    path, url = request.destination, request.url
    if split is None:
        [prepared] = run_all([request], on_progress)
        return prepared
    parts = plan_parts(split, split_seed, split_by)
    check_destination(path, parts)
    urls = [None if url is None else f"{url}/{part.name}" for part in parts]
    requests = [
        dataclasses.replace(request, destination=path / part.name, url=own, part=part)
        for part, own in zip(parts, urls, strict=True)
    ]
    made = {part.name: each for part, each in zip(parts, run_all(requests, on_progress), strict=True)}
    return sum_parts(url or path, {name: made[name] for name, _ in parts[0].parts})


def _with_classes(reading: SourceOptions, classes: Classes | None) -> SourceOptions:
    return reading if classes is None else dataclasses.replace(reading, classes=read_classes(classes))


def _as_transform(transform: Transform | BatchFunction | str | None) -> Transform:
    if transform is None:
        return KeepColumns()
    if hasattr(transform, "before_run") and not isinstance(transform, type):
        return cast(Transform, transform)
    is_named = isinstance(transform, str) and ":" in transform
    if is_named or (callable(transform) and not isinstance(transform, type)):
        return FunctionTransform(transform)
    raise TypeError(f"transform={transform!r:.80}; give Tokenize(...), DecodeImage(...), or a function of a batch.")


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
    if wrong := find_mismatch(names, [str], "the list"):
        raise FormatError(f"{path} is not a list of classes: {wrong}.")
    return tuple(names)
