"""Where datasets come from: `penstock.open`, `penstock.from_arrays` and `penstock.concat`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from numpy.typing import DTypeLike

from penstock.dataset import ArraysLocation, FolderLocation, ForeignLocation, JoinedLocation, check_concat, find_earlier
from penstock.errors import FormatError, check_choice, whole_number
from penstock.filesystem import local_path
from penstock.plan._dataset import Dataset
from penstock.schema import name_of_dtype
from penstock.shards import Check, ForeignFormat, Io, guess_format, megatron_pair

Format = Literal["penstock", "npy", "raw", "megatron"]


def open_dataset(
    path: str | os.PathLike[str],
    *,
    io: Io = "auto",
    check: Check = "window",
    format: Format | None = None,
    dtype: DTypeLike | None = None,
    shape: Sequence[int] | None = None,
    column: str | None = None,
    offset: int = 0,
    as_of: str | Mapping[str, Any] | None = None,
) -> Dataset:
    """Open a dataset folder, or adopt a `.npy`, raw `.bin` or Megatron `.bin/.idx` file as it is.

    Args:
        path: The folder, or the file.
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

    Raises:
        DatasetChanged: it was not only appended to since `as_of`.
        IncompleteDataset: nothing finished is at `path`.
        FormatError: what is there is damaged, hostile, or of a newer version.

    >>> import numpy as np, tempfile, penstock
    >>> path = tempfile.mkdtemp() + "/train.bin"
    >>> np.arange(12, dtype=np.uint16).tofile(path)
    >>> penstock.open(path, dtype="uint16", shape=(-1, 4), column="tokens")[2]["tokens"].tolist()
    [8, 9, 10, 11]
    """
    check_choice("check", check, get_args(Check))
    absolute = local_path(path, "a dataset").absolute()
    kind = _resolve_format(absolute, format)
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


def _resolve_format(path: Path, format: Format | None) -> Literal["penstock"] | ForeignFormat:
    if format is not None:
        check_choice("format", format, get_args(Format))
        return format
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
