"""Convert what people hand in to arrays of exactly the column's dtype and shape, or refuse.

Nothing is changed silently: a number out of range, a fraction in an integer column, or a wrong shape is
an error that names the column. Only floats are rounded, to the column's precision.

A hash of each sample's content, which identifies it wherever it is stored.

    content of a sample    its `tokens`, else its `image`, else its `audio`, else its `text`, else all of its columns
    its hash               XXH64 of the content's bytes; of several columns, XXH64 of their hashes side by side

So a sample keeps its hash when data around it is added, removed, reordered, shuffled or cut into other shards, and when
a label is renumbered or a score recomputed. Equal contents have equal hashes. `prepare` stores them, 8 bytes per
sample, in the column `__xxh64__`; for any other data the same hashes are computed when needed.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SchemaError
from penstock.schema import Column, Ragged, Schema, array_of_tensor, exact_array
from penstock.shards import _kernels
from penstock.shards._provenance import ORIGIN_COLUMN, ORIGIN_SPEC


def convert_sample(column: Column, value: Any) -> Any:
    """One sample as an array: `column.shape`, or `[n, *column.shape]` when ragged; byte strings as a `Ragged`."""
    if column.kind == "byte_strings":
        return _convert_byte_strings(column, [value]).values
    if column.kind == "bytes":
        return _convert_bytes(column, value)
    array = _convert_dtype(column, value)
    if column.is_ragged:
        return _check_items(column, array)
    return _check_shape(column, array, array.shape)


def convert_batch(column: Column, value: Any) -> Ragged | NDArray[Any]:
    """Many samples of a column: an array `[n, *column.shape]`, or a `Ragged`."""
    if not column.is_ragged:
        array = _convert_dtype(column, value)
        return _check_items(column, array)
    if column.kind == "byte_strings":
        return _convert_byte_strings(column, value)
    if isinstance(value, Ragged):
        values = _convert_dtype(column, value.values)
        offsets = np.asarray(value.offsets, np.int64)
        is_valid = (
            len(offsets) and offsets[0] == 0 and offsets[-1] == len(values) and (offsets[1:] >= offsets[:-1]).all()
        )
        if not is_valid:
            raise SchemaError(
                f"Column {column.name!r}: the offsets must be non-decreasing, from 0 to the number of values."
            )
        return Ragged(_check_items(column, values), offsets, column.kind == "bytes")
    _check_batch(column, value)
    samples = [convert_sample(column, sample) for sample in value]
    values = np.concatenate(samples) if samples else np.empty((0, *column.shape), column.dtype)
    return Ragged.from_lengths(values, [len(sample) for sample in samples], column.kind == "bytes")


def _check_batch(column: Column, value: Any) -> None:
    if not isinstance(value, Iterable):
        raise SchemaError(f"Column {column.name!r}: a batch has one value per sample; {type(value).__name__} has none.")


def _convert_byte_strings(column: Column, value: Any) -> Ragged:
    each = Column(column.name, column.dtype, (), "bytes")
    if isinstance(value, Ragged) and value.is_nested:
        counts = convert_batch(each, Ragged(np.empty(len(value.values), np.uint8), value.offsets))
        assert isinstance(counts, Ragged)
        return Ragged(convert_batch(each, value.values), counts.offsets)
    _check_batch(column, value)
    samples = list(value)
    for sample in samples:
        if not isinstance(sample, (list, tuple)):
            raise SchemaError(
                f"Column {column.name!r} holds lists of byte strings; this sample is {type(sample).__name__}."
            )
    return Ragged.from_lengths(
        convert_batch(each, [string for sample in samples for string in sample]), [len(sample) for sample in samples]
    )


def stored_columns(batch: Mapping[str, Ragged | NDArray[Any]]) -> dict[str, Ragged | NDArray[Any]]:
    """A converted batch as shards hold it: see `Column.stored`."""
    found: dict[str, Ragged | NDArray[Any]] = {}
    for name, values in batch.items():
        if isinstance(values, Ragged) and values.is_nested:
            found[name], found[f"{name}.sizes"] = values.parts
        else:
            found[name] = values
    return found


def _convert_bytes(column: Column, value: Any) -> NDArray[np.uint8]:
    if isinstance(value, str):
        raise SchemaError(f"Column {column.name!r} holds bytes, not str: encode it, as in text.encode().")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value.tobytes() if isinstance(value, memoryview) else value, np.uint8)
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim != 1:
        raise SchemaError(f"Column {column.name!r} holds bytes; this value is {type(value).__name__}.")
    return array


def _convert_dtype(column: Column, value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray) and value.dtype == column.dtype:
        return value
    array = _as_array(column, value)
    if array.dtype == column.dtype or array.size == 0:
        return array.astype(column.dtype)
    source, target = array.dtype.kind, column.dtype.kind
    if source in "iu" and target in "iu":
        _check_range(column, array)
        return array.astype(column.dtype)
    # ml_dtypes' floats have kind "V"; numpy would cast complex numbers to them and drop the imaginary part.
    fits = np.can_cast(array.dtype, column.dtype, "same_kind") or (target == "V" and source in "fiuV")
    if not fits or (source == "c" and target != "c"):
        raise SchemaError(
            f"Column {column.name!r} holds {column.dtype.name}; {array.dtype.name} would lose information."
        )
    return _convert_floats(column, array)


def _as_array(column: Column, value: Any) -> NDArray[Any]:
    try:
        array = exact_array(array_of_tensor(value) if _is_tensor(value) else value)
    except (ValueError, TypeError, RuntimeError) as error:  # torch raises the latter two
        raise SchemaError(f"Column {column.name!r}: this value cannot be converted to an array: {error}") from None
    if array.dtype.kind not in "biufcV" or array.dtype.type is np.void:
        raise SchemaError(
            f"Column {column.name!r} holds {column.dtype.name}; "
            f"{type(value).__name__} is not a number, or does not fit 64 bits."
        )
    return array


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # imported by anyone who has a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _check_range(column: Column, array: NDArray[Any]) -> None:
    limits = np.iinfo(column.dtype)
    low, high = int(array.min()), int(array.max())
    if low < limits.min or high > limits.max:
        raise SchemaError(
            f"Column {column.name!r} holds {column.dtype.name} ({limits.min} to {limits.max}); "
            f"the values go from {low} to {high}. Declare a wider dtype."
        )


def _convert_floats(column: Column, array: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(column.dtype)
    overflown = np.isfinite(array) & ~np.isfinite(converted)
    if overflown.any():
        raise SchemaError(f"Column {column.name!r} holds {column.dtype.name}, which cannot hold {array[overflown][0]}.")
    return converted


def _check_items(column: Column, array: NDArray[Any]) -> NDArray[Any]:
    """Check an array whose first dimension counts samples, or elements of a ragged sample."""
    if array.shape == (0,):  # an empty list has no other dimensions
        return array.reshape(0, *column.shape)
    return _check_shape(column, array, array.shape[1:] if array.ndim else (-1,))


def _check_shape(column: Column, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if shape != column.shape:
        raise SchemaError(
            f"Column {column.name!r} is {column.spec}; an array of shape {list(array.shape)} does not fit."
        )
    return array


Hashes = NDArray[np.uint64]
_CONTENT = ("tokens", "image", "audio", "text")


def content_columns(schema: Schema) -> tuple[str, ...]:
    """The columns that make up a sample's content, which does not include where it came from."""
    for name in _CONTENT:
        if name in schema:
            return (name,)
    columns = schema.shown.columns
    content = tuple(column.name for column in columns if (column.name, column.spec) != (ORIGIN_COLUMN, ORIGIN_SPEC))
    return content or tuple(schema.shown)


def hash_samples(columns: Sequence[Ragged | NDArray[Any]]) -> Hashes:
    """One hash per sample over all of these columns; several byte strings count as the two columns that are stored."""
    parts = [part for column in columns for part in (column.parts if isinstance(column, Ragged) else (column,))]
    hashes = [_hash_column(part) for part in parts]
    return hashes[0] if len(hashes) == 1 else _hash_column(np.stack(hashes, axis=1))


def hash_texts(texts: Iterable[str]) -> Hashes:
    """A hash of each text, such as the path of a file."""
    encoded = [text.encode(errors="surrogatepass") for text in texts]
    joined = np.frombuffer(b"".join(encoded), np.uint8)
    return _hash_column(Ragged.from_lengths(joined, [len(text) for text in encoded], True))


def hash_content(schema: Schema, batch: Mapping[str, Ragged | NDArray[Any]]) -> Hashes:
    """The hash of each sample of a converted batch."""
    return hash_samples([batch[name] for name in content_columns(schema)])


def _hash_column(column: Ragged | NDArray[Any]) -> Hashes:
    values, edges = (
        (column.values, column.offsets) if isinstance(column, Ragged) else (column, np.arange(len(column) + 1))
    )
    item_bytes = values.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    hashes = np.empty(len(edges) - 1, np.uint64)
    _kernels.hash_spans(data, np.ascontiguousarray(edges, np.int64) * item_bytes, hashes)
    return hashes
