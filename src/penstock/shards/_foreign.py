"""Files of other programs, read in place: nothing is copied, nothing is converted.

    .npy            numpy's own header; a sample is one row of the first dimension
    raw (.bin)      the caller gives dtype and shape, as for nanoGPT's files; a header can be skipped
    Megatron        `name.bin` with tokens and `name.idx` with lengths; a sample is one document

They carry no checksums, so only their sizes and their index can be checked. Layouts: numpy's
`numpy.lib.format`, Megatron's `core/datasets/indexed_dataset.py` (also fairseq's): magic
`MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequences, u64 documents + 1, then i32 lengths,
i64 byte pointers, i64 document borders, and for multimodal data one i8 mode per sequence.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.filesystem import MappedFile
from penstock.schema import Column, Ragged, Schema, dtype_from_name, dtype_name, offsets_of
from penstock.shards._arrays import ArrayStorage
from penstock.shards._checksums import BLOCK_BYTES, checksum

ForeignFormat = Literal["npy", "raw", "megatron"]

_MAX_NPY_HEADER_BYTES = 1 << 16
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<QBQQ")
_MEGATRON_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


def guess_format(path: Path) -> ForeignFormat | None:
    """Format of a file, guessed from its name; None if it is not a foreign file."""
    if path.suffix == ".npy":
        return "npy"
    if path.suffix == ".idx" or os.path.isfile(megatron_pair(path)[0]):
        return "megatron"
    return "raw" if path.suffix == ".bin" else None


def megatron_pair(path: Path) -> tuple[Path, Path]:
    """(index, data) of a Megatron dataset, given either file or their common stem, which may contain dots."""
    stem = path.name.removesuffix(".idx").removesuffix(".bin")
    return path.parent / f"{stem}.idx", path.parent / f"{stem}.bin"


def open_npy(path: Path, column: str) -> ArrayStorage:
    """A `.npy` file; its rows are the samples."""
    file = _map(path)
    try:
        with open(path, "rb") as stream:
            shape, is_fortran, dtype = _read_npy_header(stream)
            begin = stream.tell()
    # Whatever numpy raises on a header that it cannot parse.
    except (ValueError, TypeError, OSError, TokenError, MemoryError, RecursionError) as error:
        raise FormatError(f"{path}: not a .npy file that numpy can read: {type(error).__name__}: {error}") from None
    if dtype.hasobject or dtype.fields is not None or dtype.byteorder == ">":
        raise FormatError(f"{path}: dtype {dtype} cannot be mapped as a column; save plain little-endian numbers.")
    if is_fortran and len(shape) > 1:
        raise FormatError(f"{path}: stored in Fortran order, so its rows are not contiguous; save a C-order copy.")
    return _map_array(file, column, dtype, shape, begin)


def _read_npy_header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran order, dtype); versions 2 and 3 differ only in the encoding of field names."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"unknown version {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream, max_header_size=_MAX_NPY_HEADER_BYTES)
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} has a negative size")
    return shape, is_fortran, dtype


def open_raw(path: Path, column: str, dtype: str | None, shape: Sequence[int] | None, offset: int = 0) -> ArrayStorage:
    """A file of numbers after a header of `offset` bytes; the first size of `shape` may be -1, for all rows."""
    if dtype is None:
        raise FormatError(
            f"{path}: a raw file does not describe itself. Give dtype= and, unless each number is a sample, shape=, "
            "as in penstock.open(path, dtype='uint16', shape=(-1, 1024))."
        )
    file, kind = _map(path), dtype_from_name(dtype)
    sizes = tuple(shape) if shape is not None else (-1,)
    if not sizes or any(size < 0 for size in sizes[1:]) or sizes[0] < -1:
        raise ValueError(f"shape={sizes}: sizes must not be negative, except -1 for the first.")
    if not 0 <= offset <= file.size:
        raise FormatError(f"{path}: offset={offset:,}, but the file has {file.size:,} bytes.")
    row_bytes, num_bytes = math.prod(sizes[1:]) * kind.itemsize, file.size - offset
    if sizes[0] == -1:
        if row_bytes == 0 or num_bytes % row_bytes:
            after = f" after its header of {offset:,}" if offset else ""
            raise FormatError(
                f"{path}: {num_bytes:,} bytes{after} are not a whole number of rows of {row_bytes:,} bytes."
            )
        sizes = (num_bytes // row_bytes, *sizes[1:])
    return _map_array(file, column, kind, sizes, offset, mark=f" from {offset}" if offset else "")


def open_megatron(path: Path, column: str) -> ArrayStorage:
    """A Megatron pair, by the name of either file; documents are the samples."""
    index_path, data_path = megatron_pair(path)
    index, file = _map(index_path), _map(data_path)
    dtype, offsets = _read_megatron_index(index)
    end = int(offsets[-1]) * dtype.itemsize
    if end > file.size:
        raise FormatError(
            f"{data_path}: {file.size:,} bytes, but {index_path.name} points to byte {end:,}. "
            "The file is truncated or belongs to another index."
        )
    values = file.read(0, file.size // dtype.itemsize * dtype.itemsize).view(dtype)
    schema = Schema((Column.parse(column, f"{dtype_name(dtype)}[*]"),))
    identity = functools.partial(_sampled_identity, file, index)
    return ArrayStorage(schema, {column: Ragged(values, offsets)}, file=file, identity=identity)


def _read_megatron_index(index: MappedFile) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """(dtype, where each document begins in the tokens, and the end of the last)."""
    raw, start = index.bytes, len(_MEGATRON_MAGIC) + _MEGATRON_HEADER.size
    if len(raw) < start or raw[: len(_MEGATRON_MAGIC)].tobytes() != _MEGATRON_MAGIC:
        raise FormatError(f"{index.path}: not a Megatron index (it does not begin with MMIDIDX).")
    version, code, num_sequences, num_borders = _MEGATRON_HEADER.unpack(raw[len(_MEGATRON_MAGIC) : start].tobytes())
    if version != 1 or not 1 <= code <= len(_MEGATRON_DTYPES):
        raise FormatError(
            f"{index.path}: version {version} with dtype code {code}; only version 1 with codes 1 to 8 is supported."
        )
    needed = start + 12 * num_sequences + 8 * num_borders
    if len(raw) not in (needed, needed + num_sequences):
        raise FormatError(
            f"{index.path}: {len(raw):,} bytes, but its counts need {needed:,}. It is truncated or damaged."
        )
    dtype = dtype_from_name(_MEGATRON_DTYPES[code - 1])
    parts = np.split(raw[start:needed], [4 * num_sequences, 12 * num_sequences])
    lengths, pointers, borders = (parts[0].view("<i4"), *(part.tobytes() for part in parts[1:]))
    ends = offsets_of(lengths)
    if (lengths < 0).any() or not np.array_equal(np.frombuffer(pointers, "<i8"), ends[:-1] * dtype.itemsize):
        raise FormatError(
            f"{index.path}: its pointers do not match its lengths; the sequences are not stored back to back."
        )
    documents = np.frombuffer(borders, "<i8")
    if not len(documents) or documents[0] != 0 or documents[-1] != num_sequences or (np.diff(documents) < 0).any():
        raise FormatError(f"{index.path}: its document boundaries do not rise from 0 to {num_sequences:,}.")
    return dtype, ends[documents]


def _map(path: Path) -> MappedFile:
    """The file that the user named, even through links, which download caches consist of."""
    return MappedFile(path.resolve())


def _map_array(
    file: MappedFile, column: str, dtype: np.dtype[Any], shape: tuple[int, ...], begin: int, *, mark: str = ""
) -> ArrayStorage:
    """The numbers from byte `begin` on; `mark` distinguishes two ways to read the same file."""
    if not shape:
        raise FormatError(f"{file.path}: it holds a single number, not samples.")
    end = begin + math.prod(shape) * dtype.itemsize
    if end != file.size:
        raise FormatError(f"{file.path}: {file.size:,} bytes, but {dtype} of shape {list(shape)} takes {end:,}.")
    try:
        spec = Column(column, dtype, tuple(shape[1:])).spec
    except SchemaError as error:
        raise FormatError(f"{file.path}: {error}") from None
    schema = Schema((Column.parse(column, spec),))
    values = np.ndarray(shape, dtype, buffer=file.bytes, offset=begin) if file.size else np.empty(shape, dtype)
    identity = functools.partial(_sampled_identity, file, mark=mark)
    return ArrayStorage(schema, {column: values}, file=file, identity=identity)


def _sampled_identity(*files: MappedFile, mark: str = "") -> str:
    """Sizes, and checksums of up to 64 blocks spread over each file: reading all of 100 GB would take a minute."""
    parts = []
    for file in files:
        file.check_size()
        starts = np.linspace(0, max(0, file.size - BLOCK_BYTES), 64, dtype=np.int64)
        sums = [checksum(file.read(start, min(start + BLOCK_BYTES, file.size))) for start in np.unique(starts).tolist()]
        parts.append(f"{file.size} {sums}")
    return " ".join(parts) + mark
