"""Where datasets come from: `penstock.open`, `penstock.from_arrays` and `penstock.concat`.

Reading plan files: TOML that people can read and edit, free of code. `Plan.to_toml` writes them.

A file names functions as `package.module:function`. Loading it imports none of them unless their
package is allowed by name: a file from a stranger can name anything.
"""

import os
import reprlib
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from numpy.typing import DTypeLike

from penstock.dataset import (
    ArraysLocation,
    FilesLocation,
    FolderLocation,
    ForeignLocation,
    JoinedLocation,
    RemoteLocation,
    SplitPart,
    check_concat,
    find_earlier,
    open_store_folder,
    open_store_tars,
)
from penstock.errors import DatasetChanged, FormatError, PenstockError, StorageError, check_choice, whole_number
from penstock.filesystem import is_url, local_path, read_small, similar_path
from penstock.identity import import_function
from penstock.plan._dataset import Dataset
from penstock.plan._mix import mix
from penstock.plan._plan import FILE_VERSION, Plan
from penstock.schema import name_of_dtype
from penstock.shards import (
    ArrowStorage,
    Check,
    FilesFormat,
    ForeignFormat,
    HuggingFaceDataset,
    Io,
    OnFault,
    find_files,
    guess_files_format,
    guess_format,
    megatron_pair,
    rows_of,
)

Format = Literal["penstock", "npy", "raw", "megatron", "tar", "arrow"]


def open_dataset(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | HuggingFaceDataset,
    *,
    io: Io = "auto",
    check: Check = "window",
    format: Format | None = None,
    dtype: DTypeLike | None = None,
    shape: Sequence[int] | None = None,
    column: str | None = None,
    offset: int = 0,
    as_of: str | Mapping[str, Any] | None = None,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    on_error: OnFault = "raise",
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
) -> Dataset:
    """Open a dataset, in a folder or at a URL, or adopt what other programs wrote, where it is: tars of WebDataset,
    folders and objects of Hugging Face `datasets`, `.arrow` files, a `.npy`, raw `.bin` or Megatron `.bin/.idx` file.

    Args:
        path: The folder, the file, or a URL such as "s3://bucket/corpus"; for tars and Arrow also a pattern
            ("train-{000..099}.tar", "*.arrow"), a list, or a memory-mapped `datasets.Dataset`. Of a remote dataset only
            the manifest is fetched now, and its shards when they are needed, or ahead of a loader. Tars at URLs are
            fetched once when they are first opened, to make their index.
        io: "map" maps files into memory; "pread" reads them, which survives a server that goes away;
            "auto" maps, except on network file systems.
        check: "window" checks each stretch of data before its first use; "open" checks all of it now;
            "never" trusts the disk.
        format: What is at `path`, if its name does not say.
        dtype: Type of the numbers in a raw file, as in "uint16" or np.uint16.
        shape: Shape of a raw file, as in (-1, 1024); without it every number is a sample.
        offset: Bytes of a raw file before its numbers, such as a header made with `struct`.
        column: Name for the one column of a foreign file; by default "tokens" for Megatron, "data" for others.
        as_of: The state of a loader, or a fingerprint, from before samples were appended: the dataset as it was then.
        columns: Which columns of tars or Arrow files to open; for tars also their types, as in
            {"jpg": "bytes", "id": "bytes"}.
        on_error: Samples of tars or Arrow files in which something is missing, doubled or out of order: "raise", or
            "skip" to leave them out, counted in `attributes`.
        cache: For URLs: a folder on this node's own storage that keeps what was fetched, for all its processes; by
            default on the node's scratch if the environment names one, else in the user's cache folder.
        cache_bytes: For URLs: what the cache may take; by default four fifths of what is free. All datasets in the
            folder share it.

    Raises:
        DatasetChanged: it was not only appended to since `as_of`.
        IncompleteDataset: nothing finished is at `path`.
        FormatError: what is there is damaged, hostile, or of a newer version.
        StoreError: an object store refuses, for the reason that the message gives.

    >>> import numpy as np, tempfile, penstock
    >>> path = tempfile.mkdtemp() + "/train.bin"
    >>> np.arange(12, dtype=np.uint16).tofile(path)
    >>> penstock.open(path, dtype="uint16", shape=(-1, 4), column="tokens")[2]["tokens"].tolist()
    [8, 9, 10, 11]
    """
    check_choice("check", check, get_args(Check))
    check_choice("on_error", on_error, get_args(OnFault))
    if isinstance(path, str | os.PathLike):
        paths = [path]
    elif isinstance(path, Sequence):
        paths = list(path)
    else:
        return _open_object(path, columns, on_error)
    if not paths:
        raise ValueError("open(): the list of paths is empty.")
    are_as_they_are = io == "auto" and (as_of, dtype, shape, column) == (None, None, None, None) and not offset
    only = (
        f"{paths[0]} is opened as it is: of open()'s options, only columns= and on_error= are for tars and Arrow files."
    )
    if is_url(paths[0]) and (format == "tar" or (format is None and os.fspath(paths[0]).endswith(".tar"))):
        if not are_as_they_are:
            raise ValueError(only)
        urls, (root, budget) = [os.fspath(each) for each in paths], _cache_of(cache, cache_bytes)
        folder = open_store_tars(urls, root, budget)
        return Dataset(replace(_locate(urls, "tar", columns, on_error), folder=folder, cache=root, cache_bytes=budget))
    if is_url(paths[0]):
        described = {"format": format, "dtype": dtype, "shape": shape, "column": column, "columns": columns}
        if unfit := [name for name, value in {**described, "offset": offset or None}.items() if value is not None]:
            raise ValueError(
                f"{paths[0]} is read as a prepared dataset, which describes itself: leave out {unfit[0]}=."
            )
        return _open_remote(os.fspath(paths[0]), io, check, cache, cache_bytes, as_of)
    if cache is not None or cache_bytes is not None:
        raise ValueError(f"cache= and cache_bytes= are for URLs; {paths[0]} is read where it is.")
    given = [str(local_path(each, "a dataset").absolute()) for each in paths]
    kind = _resolve_format(given, format)
    absolute = Path(given[0])
    if kind == "tar" or kind == "arrow":
        if not are_as_they_are:
            raise ValueError(only)
        return Dataset(_locate(given, kind, columns, on_error))
    if len(given) > 1 or columns is not None or on_error != "raise":
        raise ValueError(
            f"{absolute}: lists of paths, columns= and on_error= are for tars and Arrow files. penstock.concat joins "
            "datasets, select_columns() chooses their columns."
        )
    if kind == "penstock":
        if dtype is not None or shape is not None or column is not None or offset:
            raise ValueError(
                f"{absolute} is a dataset that describes itself; dtype=, shape=, offset= and column= are for raw files."
            )
        earlier = None if as_of is None else find_earlier(absolute, as_of)
        return Dataset(FolderLocation(path=absolute, io=io, check=check, as_of=earlier))
    if as_of is not None:
        raise ValueError(f"as_of= is for dataset folders, which samples are appended to; {absolute} is a file.")
    if kind != "raw" and (dtype is not None or shape is not None or offset):
        raise ValueError(f"{absolute} says itself what it holds; dtype=, shape= and offset= are for raw files.")
    if io == "pread":
        raise ValueError(f"io='pread' is for dataset folders; {absolute} is adopted as a memory map.")
    name = column or ("tokens" if kind == "megatron" else "data")
    sizes = tuple(shape) if shape is not None else None
    number = None if dtype is None else name_of_dtype(dtype)
    skipped = whole_number("open", "offset", offset)
    location = ForeignLocation(path=absolute, format=kind, column=name, dtype=number, shape=sizes, offset=skipped)
    return Dataset(location)


def _open_remote(
    url: str,
    io: Io,
    check: Check,
    cache: str | os.PathLike[str] | None,
    cache_bytes: int | None,
    as_of: str | Mapping[str, Any] | None,
) -> Dataset:
    root, budget = _cache_of(cache, cache_bytes)
    folder = open_store_folder(url, root, budget)
    earlier = None if as_of is None else find_earlier(folder.path, as_of)
    return Dataset(
        RemoteLocation(
            url=url.rstrip("/"), folder=folder, io=io, check=check, cache=root, cache_bytes=budget, as_of=earlier
        )
    )


def _cache_of(cache: str | os.PathLike[str] | None, cache_bytes: int | None) -> tuple[Path | None, int | None]:
    root = None if cache is None else local_path(cache, "a cache").absolute()
    return root, None if cache_bytes is None else whole_number("open", "cache_bytes", cache_bytes, at_least=1)


def from_arrays(arrays: Mapping[str, Any]) -> Dataset:
    """A dataset of arrays in RAM: the first dimension counts samples.

    Args:
        arrays: For each column an array, a `Ragged`, or a list of arrays or byte strings.

    >>> ds = from_arrays({"x": [[1, 2], [3, 4]], "name": [b"one", b"two"]})
    >>> ds[1]["name"]
    b'two'
    """
    return Dataset(ArraysLocation(dict(arrays)))


def concat(*datasets: Dataset, different_tokenizers: bool = False) -> Dataset:
    """The samples of several datasets with the same columns, one dataset after the other. Nothing is copied.

    Args:
        datasets: In the order of their samples. For fixed shares of each, use `mix`.
        different_tokenizers: Accept datasets whose token ids mean different things, which are refused otherwise.

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


def _locate(
    paths: Sequence[str], kind: FilesFormat, columns: Sequence[str] | Mapping[str, str] | None, on_error: OnFault
) -> FilesLocation:
    names = [columns] if isinstance(columns, str) else columns
    chosen = names if isinstance(names, Mapping) or names is None else dict.fromkeys(names, "")
    return FilesLocation(
        paths=tuple(paths), format=kind, columns=None if chosen is None else tuple(chosen.items()), on_error=on_error
    )


def _open_object(
    given: HuggingFaceDataset, columns: Sequence[str] | Mapping[str, str] | None, on_error: OnFault
) -> Dataset:
    """A `datasets.Dataset` by its files: its slices and indices are a list of samples, as of `take`."""
    found = find_files(given)
    if on_error != "raise":
        raise ValueError(
            "on_error='skip' is for files: save the dataset, ds.save_to_disk(folder), and open the folder."
        )
    location = _locate([str(path) for path in found.paths], "arrow", columns or found.columns, "raise")
    dataset = Dataset(location)
    assert isinstance(dataset.storage, ArrowStorage)
    rows = rows_of(found, dataset.storage)
    return dataset if rows is None else dataset.take(rows)


def _resolve_format(paths: Sequence[str], format: Format | None) -> Literal["penstock"] | ForeignFormat | FilesFormat:
    if format is not None:
        check_choice("format", format, get_args(Format))
        return format
    path = Path(paths[0])
    if (files := guess_files_format(paths[0])) is not None:
        return files
    # `os.path` raises nothing: opening the path reports what is wrong with it.
    if not os.path.isdir(path) and (os.path.isfile(path) or os.path.isfile(megatron_pair(path)[0])):
        guess = guess_format(path)
        if guess is None:
            raise FormatError(
                f"{path}: a file whose name does not say its format. "
                "Give format='npy', 'raw' or 'megatron', or turn it into a dataset."
            )
        return guess
    return "penstock"


_SHOWN = 300
_MAX_BYTES = 16 << 20
_GROUP_BEFORE = 16
"""The group meant by a file that names none: the default when such files were written."""
_VERBS = ("cast", "sample", "balance", "shuffle", "window", "pack", "pad", "take", "skip", "repeat", "map", "batch")


def load_plan(path: str | os.PathLike[str], *, allow_code: Collection[str] = ()) -> Plan:
    """The plan in a TOML file.

    Args:
        path: The file.
        allow_code: Packages whose functions the file may name; nothing else is imported.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: the file is not a plan, or names a function of a package that is not allowed.
        DatasetChanged: a dataset is not the one that the plan was made for.
    """
    where = local_path(path, "a plan file")
    if isinstance(allow_code, str):
        raise TypeError(f"allow_code={allow_code!r}: give a list of packages, as in [{allow_code!r}].")
    if where.is_dir():
        raise FormatError(f"{where} is a folder; a plan is a file with the text that plan.to_toml() gives.")
    try:
        fields = tomllib.loads(read_small(where, _MAX_BYTES).decode())
    except FileNotFoundError:
        raise FileNotFoundError(f"{where}: no such plan file.{similar_path(where)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where}: not TOML: {_short(error)}") from None
    if (version := fields.get("version")) != FILE_VERSION:
        raise FormatError(
            f"{where}: version {reprlib.repr(version)}; this Penstock reads plans of version {FILE_VERSION}."
        )
    try:
        return _load(fields, where, frozenset(allow_code))
    except PenstockError:
        raise
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise FormatError(f"{where}: not a plan that makes sense ({type(error).__name__}: {_short(error)}).") from error


def _load(fields: dict[str, Any], where: Path, allowed: frozenset[str]) -> Plan:
    source = fields["source"]
    if "mix" in source:
        parts = {name: (_load(part, where, allowed), part["weight"]) for name, part in source["mix"].items()}
        plan = mix(
            parts,
            seed=source["seed"],
            rows=source.get("rows"),
            epoch=source.get("epoch"),
            temperature=source.get("temperature", 1.0),
            schedule={int(row): weights for row, weights in source.get("schedule", {}).items()},
            source_ids=bool(source.get("source_ids", False)),
            different_tokenizers=bool(source.get("different_tokenizers", False)),
        )
    else:
        plan = _load_dataset(source, where).as_plan()
    for stage in fields.get("stages", []):
        plan = _load_stage(plan, dict(stage), where, allowed)
    return plan


def _load_dataset(source: dict[str, Any], where: Path) -> Dataset:
    dataset = _join(source, where) if {"concat", "zip", "unfold"} & source.keys() else _open(source, where)
    for recipe in source.get("splits", []):
        dataset = dataset.select(SplitPart.from_json(*recipe))
    if all(name in dataset.schema for name in source["columns"]):
        dataset = dataset.select_columns(source["columns"])
    if dataset.fingerprint != source["fingerprint"]:
        data = source.get("path", "data that is joined")
        raise DatasetChanged(
            f"{where}: the plan was made for {data} with the fingerprint {_short(source['fingerprint'])}; "
            f"it now has {dataset.fingerprint}. Make the plan again, or restore the data."
        )
    return dataset


def _join(source: dict[str, Any], where: Path) -> Dataset:
    if "unfold" in source:
        cut = source["unfold"]
        return _load_dataset(cut["steps"], where).unfold(cut["length"], cut["stride"])
    if "concat" in source:
        return concat(*(_load_dataset(part, where) for part in source["concat"].values()), different_tokenizers=True)
    first, *others = (_load_dataset(part, where) for part in source["zip"].values())
    for other in others:
        first = first.zip(other)
    return first


def _open(source: dict[str, Any], where: Path) -> Dataset:
    names = ("io", "check", "format", "column", "dtype", "shape", "offset", "as_of", "on_error")
    given = {name: source[name] for name in names if name in source}
    given |= {"columns": source["types"]} if "types" in source else {}
    try:
        return open_dataset(source["path"], **given)
    except PenstockError:
        raise
    except OSError as error:
        raise StorageError(f"{where}: {_short(source['path'])} cannot be opened: {_short(error)}") from error


def _load_stage(plan: Plan, stage: dict[str, Any], where: Path, allowed: frozenset[str]) -> Plan:
    verb = stage.pop("verb")
    if verb not in _VERBS:
        raise FormatError(f"{where}: there is no stage {reprlib.repr(verb)}; the stages are {', '.join(_VERBS)}.")
    if verb == "map":
        stage["function"] = _import(str(stage["function"]), where, allowed)
    if verb == "shuffle":
        stage.setdefault("group", _GROUP_BEFORE)
    if verb == "cast":
        stage = dict(stage["dtypes"])
    try:
        added = getattr(plan, verb)(**stage)
    except PenstockError:
        raise
    except (TypeError, ValueError) as error:
        raise FormatError(f"{where}: {verb}: {_short(error)}") from None
    assert isinstance(added, Plan)
    return added


def _import(name: str, where: Path, allowed: frozenset[str]) -> Callable[..., Any]:
    name = _short(name)
    module = name.partition(":")[0]
    if not _is_allowed(module, allowed):
        raise FormatError(
            f"{where}: names the function {name}, and running code of {module.partition('.')[0]!r} was not allowed. "
            f"If you trust it: penstock.load_plan(path, allow_code=[{module.partition('.')[0]!r}]), or --allow-code."
        )
    try:
        found = import_function(name)
    except (ImportError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: the function {name} cannot be found: {error}") from error
    home = str(getattr(found, "__module__", None))
    if not _is_allowed(home, allowed):  # `package:os.system` is code of os
        raise FormatError(f"{where}: {name} is not a function of {module.partition('.')[0]!r} (it is from {home}).")
    return found


def _short(what: object) -> str:
    """The beginning of what a file says, which may be as long as the file."""
    text = str(what)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _is_allowed(module: str, allowed: frozenset[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in allowed)
