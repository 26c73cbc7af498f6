"""Columns that already are arrays: in RAM, or a foreign file mapped in place.

The same interface as a dataset folder, over one shard that is always open.

Files of other programs, read in place: nothing is copied, nothing is converted.

    .npy            numpy's own header; a sample is one row of the first dimension
    raw (.bin)      the caller gives dtype and shape, as for nanoGPT's files; a header can be skipped
    Megatron        `name.bin` with tokens and `name.idx` with lengths; a sample is one document

They carry no checksums, so only their sizes and their index can be checked. Layouts: numpy's
`numpy.lib.format`, Megatron's `core/datasets/indexed_dataset.py` (also fairseq's): magic
`MMIDIDX\0\0`, u64 version 1, u8 dtype code, u64 sequences, u64 documents + 1, then i32 lengths,
i64 byte pointers, i64 document borders, and for multimodal data one i8 mode per sequence.
"""

import functools
import hashlib
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.filesystem import MappedFile
from penstock.schema import (
    Column,
    Ragged,
    Schema,
    common_dtype,
    dtype_from_name,
    dtype_name,
    exact_array,
    is_byte_strings,
    offsets_of,
)
from penstock.shards._convert import convert_batch, stored_columns
from penstock.shards._gather import Gathered
from penstock.shards._layout import BLOCK_BYTES, checksum
from penstock.shards._storage import COUNT, FILE, OFFSETS, READY, SIZE, STATE, VALUES, Table, column_slots


class ArrayStorage(Gathered):
    """Random access to columns held in memory.

    `file` is what they are mapped from, if anything; `identity` identifies the data without reading all of it.
    """

    def __init__(
        self,
        schema: Schema,
        columns: Mapping[str, Ragged | NDArray[Any]],
        *,
        file: MappedFile | None = None,
        identity: Callable[[], str] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.schema = schema
        self._columns = stored_columns(columns)
        self._file = file
        self._identity = identity
        self.attributes: Mapping[str, Any] = attributes or {}
        """Attributes that the caller gave with the arrays."""
        self.num_samples = len(next(iter(self._columns.values())))
        self.starts: NDArray[np.int64] = np.array([0, self.num_samples], np.int64)
        self.slots = column_slots(schema)
        self.value_starts = {name: np.array([0, _num_elements(part)]) for name, part in self._columns.items()}
        self.table = self._build_table()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the data: schema and checksums of the contents."""
        digest = hashlib.blake2b(repr(self.schema.to_json()).encode(), digest_size=16)
        if self._identity is not None:
            digest.update(self._identity().encode())
            return digest.hexdigest()
        for values in self._columns.values():
            parts = [values.values, values.offsets] if isinstance(values, Ragged) else [values]
            for part in parts:
                digest.update(f"{part.shape} {checksum(part.reshape(-1).view(np.uint8)):08x}".encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        parts = (part.values if isinstance(part, Ragged) else part for part in self._columns.values())
        return sum(part.nbytes for part in parts)

    def num_elements(self, column: Column) -> int:
        return int(self.value_starts[column.name][-1])

    def value(self, column: Column, index: int) -> Any:
        self._check_size()
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"Index {index} is out of range for {self.num_samples:,} samples.")
        if column.kind == "byte_strings":
            return self.read_ragged(column, np.array([index % self.num_samples])).values
        stored = self._columns[column.name]
        if isinstance(stored, Ragged):
            index %= self.num_samples
            view = stored.values[stored.offsets[index] : stored.offsets[index + 1]]
        else:
            view = np.asarray(stored[index])
        view = view.view()
        view.flags.writeable = False
        return view

    def lengths(self, column: Column, begin: int, end: int) -> NDArray[np.int64]:
        stored = self._columns[column.stored[-1].name]
        assert isinstance(stored, Ragged)
        return np.diff(stored.offsets[begin : end + 1])

    def will_need(self, column: Column, begin: int, end: int) -> None:
        """Nothing to announce: arrays in RAM are here, and foreign files are left to the kernel."""

    def dont_need(self, column: Column, begin: int, end: int) -> None:
        """Nothing to release: arrays stay in RAM."""

    def check_samples(self, column: Column, begin: int, end: int) -> None:
        """Nothing to check: neither RAM nor foreign files carry checksums."""

    def prepare(self, column: Column, index: int, part: tuple[int, int] | None = None) -> None:
        """Raise if the file shrank, or if a sample's offsets point outside it."""
        self._check_size()
        stored = self._columns[column.name]
        if isinstance(stored, Ragged):
            begin, end = stored.offsets[index : index + 2].tolist()
            if not 0 <= begin <= end <= len(stored.values):
                raise FormatError(f"Column {column.name!r}: the offsets of sample {index:,} point outside its values.")

    def prepare_elements(self, column: Column, begin: int, end: int) -> None:
        """Raise if the file shrank."""
        self._check_size()

    def sample_length(self, column: Column, index: int) -> int:
        return int(self.lengths(column, index, index + 1)[0])

    def _check_size(self) -> None:
        if self._file is not None:
            self._file.check_size()

    def _build_table(self) -> Table:
        table = Table.empty(1, len(self.schema.stored))
        row = table.rows[0]
        row[FILE], row[SIZE] = (-1, 0) if self._file is None else (self._file.descriptor, self._file.size)
        for column in self.schema.stored.columns:
            slot, stored = self.slots[column.name], self._columns[column.name]
            row[slot + STATE] = READY
            if isinstance(stored, Ragged):
                row[slot + VALUES], row[slot + OFFSETS] = (
                    stored.values.ctypes.data,
                    stored.offsets.ctypes.data,
                )
                row[slot + COUNT] = len(stored.values)
            else:
                row[slot + VALUES] = stored.ctypes.data
        return table


def _num_elements(stored: Ragged | NDArray[Any]) -> int:
    return len(stored.values) if isinstance(stored, Ragged) else len(stored)


def storage_of_arrays(arrays: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> ArrayStorage:
    """Storage of columns given as arrays, `Ragged`, or lists of arrays or byte strings, with optional attributes.

    Raises:
        SchemaError: the columns differ in length, or one cannot be stored.
    """
    if not arrays:
        raise SchemaError("A dataset needs at least one column.")
    schema = Schema.parse({name: _spec(name, value) for name, value in arrays.items()})
    columns = {column.name: _own(column, arrays[column.name]) for column in schema.columns}
    counts = {name: len(value) for name, value in columns.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(f"Every column must have the same number of samples; these have {counts}.")
    return ArrayStorage(schema, columns, attributes=attributes)


def _own(column: Column, value: Any) -> Ragged | NDArray[Any]:
    """`value` as contiguous arrays, which kernels can read by address."""
    stored = convert_batch(column, value)
    if isinstance(stored, Ragged) and stored.is_nested:
        return stored
    if isinstance(stored, Ragged):
        values, offsets = np.ascontiguousarray(stored.values), np.ascontiguousarray(stored.offsets)
        return Ragged(values, offsets, stored.is_bytes)
    return np.ascontiguousarray(stored)


def _spec(name: str, value: Any) -> str:
    """Type of the column that can hold `value`."""
    if isinstance(value, Ragged):
        values = value.values
        if value.is_nested:
            return "bytes[*]"
        return "bytes" if value.is_bytes else Column(name, values.dtype, values.shape[1:], "ragged").spec
    if isinstance(value, (list, tuple)) and len(value):
        if all(isinstance(sample, bytes) for sample in value):
            return "bytes"
        if is_byte_strings(value):
            return "bytes[*]"
        samples = [_as_array(name, sample) for sample in value]
        if samples[0].ndim and len({sample.shape for sample in samples}) > 1:
            # An empty list is an array of float64, which says nothing about the column.
            telling = [sample for sample in samples if sample.size] or samples
            return Column(name, common_dtype(telling), samples[0].shape[1:], "ragged").spec
    array = _as_array(name, value)
    if array.ndim == 0:
        raise SchemaError(f"Column {name!r} is a single value; a column has one per sample.")
    return Column(name, array.dtype, array.shape[1:]).spec


def _as_array(name: str, value: Any) -> NDArray[Any]:
    try:
        return exact_array(value)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"Column {name!r}: this value cannot be converted to an array: {error}") from None


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
    identity = functools.partial(sampled_identity, file, index)
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
    identity = functools.partial(sampled_identity, file, mark=mark)
    return ArrayStorage(schema, {column: values}, file=file, identity=identity)


def sampled_identity(*files: MappedFile, mark: str = "", num_blocks: int = 64) -> str:
    """Sizes, and checksums of a few blocks spread over each file: reading all of 100 GB would take a minute."""
    parts = []
    for file in files:
        file.check_size()
        starts = np.linspace(0, max(0, file.size - BLOCK_BYTES), num_blocks, dtype=np.int64)
        sums = [checksum(file.read(start, min(start + BLOCK_BYTES, file.size))) for start in np.unique(starts).tolist()]
        parts.append(f"{file.size} {sums}")
    return " ".join(parts) + mark
