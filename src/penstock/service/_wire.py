"""What crosses the network: a GET that names a few numbers, and one safetensors body.

    GET /v1/batch/<fingerprint>/<row>/<steps>/<rank>/<world_size>/<part>/<parts>
    200, Penstock-Checksum: <CRC32C of the body, 8 hexadecimal digits>
    body: u64 header length | JSON header | tensors

A request is small and has no body, so nothing a stranger sends takes memory. An answer is a file of the kind that
shards are, made of the arrays of a batch without copying them, and received into memory that becomes the batch. The
header's metadata says how batches lie in it (`Arrangement`), and as JSON, by name, how its tensors make up what they
hold:

    {"tensor": "x"}                      the tensor x
    {"ragged": "x", "bytes": false}      rows of uneven length: the tensors x.values and x.offsets
    {"strings": "x"}                     rows of byte strings: x.values, x.strings (where each begins) and x.offsets
    {"raw": "x"}                         a byte string: the tensor x, of uint8
    {"dict": {…}}, {"list": […]}, {"tuple": […]}    of forms
    {"json": value}                      text, numbers, true, false, null

Tensors come in falling item size behind a header padded to 64 bytes, so that every array is aligned. Nothing is ever
unpickled. docs/service.md describes the protocol for other languages.
"""

from __future__ import annotations

import functools
import json
import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FormatError, SchemaError
from penstock.loader import PlacedArray, PlacedRagged
from penstock.schema import Ragged, dtype_from_tag, dtype_name, dtype_tag
from penstock.shapes import COUNT, find_mismatch
from penstock.shards import checksum

VERSION = 1
CHECKSUM_HEADER = "Penstock-Checksum"
MAX_HEADER_BYTES = 1 << 20
_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_FORM = "penstock.form"
_ARRANGEMENT = "penstock.arrangement"
_MAX_NUMBER = 1 << 62
_MAX_DIGITS, _MAX_DIMENSIONS, _MAX_DEPTH = 20, 64, 100
"""Of numbers, shapes and forms in a header: a lie must cost little to find out."""
_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, StopIteration)
"""What walking through a lie may raise."""
_MAX_QUOTED = 200
"""Characters of a lie that an error shows."""


Arrangement = Literal["one", "stacked", "separate"]
"""How batches lie in an answer: one; several, one behind the other in the rows of its arrays; or under the names
0/x, 0/y, 1/x, … of their places."""
_HEADER = {"__metadata__": {_FORM: str, _ARRANGEMENT: frozenset(get_args(Arrangement))}}
_TENSOR = {"dtype": str, "shape": [COUNT], "data_offsets": (COUNT, COUNT)}


class BatchRequest(NamedTuple):
    """Which batches are asked for: those of `steps` steps in a row, or one part of one."""

    fingerprint: str
    row: int
    steps: int
    rank: int
    world_size: int
    part: int
    parts: int

    @property
    def path(self) -> str:
        """Where to GET it."""
        return "/".join(("/v1/batch", *map(str, self)))

    @classmethod
    def parse(cls, segments: Mapping[str, str]) -> BatchRequest:
        """The request in the segments of a path.

        Raises:
            ValueError: a segment is not a number, or is out of range.
        """
        numbers = {name: _number(name, segments[name]) for name in cls._fields[1:]}
        request = cls(segments["fingerprint"], **numbers)
        if not (request.rank < request.world_size and request.part < request.parts and request.steps):
            raise ValueError(f"{request.path}: rank, part or steps out of range.")
        if request.steps > 1 and request.part:
            raise ValueError(f"{request.path}: several steps come with all their parts; expected part 0.")
        return request


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) >= _MAX_NUMBER:
        raise ValueError(f"{name} is {text[:20]!r}; expected a number of up to 62 bits.")
    return int(text)


@dataclass(frozen=True, slots=True)
class Body:
    """One answer: a header and arrays that follow each other on the wire."""

    head: bytes
    arrays: list[NDArray[Any]]
    """Each in one piece."""

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(array.nbytes for array in self.arrays)

    @property
    def buffers(self) -> list[memoryview]:
        """All of it, without copies: they keep the arrays' memory alive."""
        return [memoryview(self.head), *(array.reshape(-1).view(np.uint8).data for array in self.arrays)]

    def checksum(self) -> int:
        """CRC32C of all of it."""
        found = 0
        for buffer in self.buffers:
            found = checksum(buffer, found)
        return found


def encode(batch: Mapping[str, Any], arrangement: Arrangement) -> Body:
    """A batch as a safetensors body, its arrays not copied.

    Raises:
        SchemaError: it holds something that is neither array, text, bytes, number, nor a list, tuple or dict of these.
    """
    named: dict[str, NDArray[Any]] = {}
    form = {name: _form_of(value, name, named) for name, value in batch.items()}
    metadata = {_FORM: json.dumps(form, separators=(",", ":")), _ARRANGEMENT: arrangement}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    ordered = sorted(named.items(), key=lambda entry: -entry[1].itemsize)
    for name, array in ordered:
        header[name] = {
            "dtype": dtype_tag(array.dtype),
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    arrays = [np.asarray(array, order="C") for _, array in ordered if array.nbytes]
    return Body(_LENGTH.pack(len(text)) + text, arrays)


def _form_of(value: Any, name: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    match value:
        case np.ndarray() if value.dtype.kind in "biufcV":
            return {"tensor": _add(arrays, name, value)}
        case Ragged() if value.is_nested:
            _add(arrays, f"{name}.values", value.values.values)
            _add(arrays, f"{name}.strings", value.values.offsets)
            _add(arrays, f"{name}.offsets", value.offsets)
            return {"strings": name}
        case Ragged():
            _add(arrays, f"{name}.values", value.values)
            _add(arrays, f"{name}.offsets", value.offsets)
            return {"ragged": name, "bytes": value.is_bytes}
        case bytes():
            return {"raw": _add(arrays, name, np.frombuffer(value, np.uint8))}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: _form_of(each, f"{name}/{key}", arrays) for key, each in value.items()}}
        case list() | tuple() if type(value) in (list, tuple):
            forms = [_form_of(each, f"{name}/{place}", arrays) for place, each in enumerate(value)]
            if all("json" in form for form in forms) and isinstance(value, list):
                return {"json": [form["json"] for form in forms]}
            return {type(value).__name__: forms}
        case np.generic() if value.dtype.kind in "biuf":
            return {"json": value.item()}
        case str() | bool() | int() | float() | None:
            return {"json": value}
    raise SchemaError(
        f"{name!r} is of type {type(value).__name__}, which cannot be sent from a server. Batches that travel may hold "
        "arrays, text, bytes, numbers, and lists, tuples and dicts of them."
    )


def _add(arrays: dict[str, NDArray[Any]], name: str, array: NDArray[Any]) -> str:
    if name in arrays or name == "__metadata__":
        raise SchemaError(f"Two parts of the batch would be sent under the name {name!r}. Rename one.")
    dtype_tag(array.dtype)  # refuses what safetensors has no name for
    arrays[name] = array
    return name


def decode(body: memoryview) -> tuple[dict[str, Any], Arrangement]:
    """What a body holds, for the layout of a batch in its memory, and how its batches lie in it.

    Arrays stay where they are; only those inside lists and dicts are copied.

    Raises:
        FormatError: it is not a body of this version, or its header lies about its size.
    """
    text = header_of(body)
    start = _LENGTH.size + len(text)
    try:
        header = json.loads(text, parse_int=_bounded_int)
        if (problem := find_mismatch(header, _HEADER, "its header")) is not None:
            raise FormatError(f"The server's answer is not a batch ({problem}).")
        metadata = header.pop("__metadata__")
        tensors = {name: _placed(entry, start, body) for name, entry in header.items()}
        _check_sizes(tensors, len(body) - start)
        form = json.loads(metadata[_FORM])
        _check_depth(form)
        parts = {name: _build(each, tensors, body) for name, each in form.items()}
    except FormatError:
        raise
    except _NONSENSE as error:
        found = f"{type(error).__name__}: {error}"[:_MAX_QUOTED]
        raise FormatError(f"The server's answer is not a batch ({found}).") from None
    return parts, metadata[_ARRANGEMENT]


def header_of(body: memoryview) -> bytes:
    """The JSON of a body's header.

    Raises:
        FormatError: the body is too short for it.
    """
    if len(body) < _LENGTH.size:
        raise FormatError(f"The server's answer has {len(body)} bytes, too few for a header.")
    (length,) = _LENGTH.unpack(body[: _LENGTH.size])
    start = _LENGTH.size + length
    if length > MAX_HEADER_BYTES or start > len(body):
        raise FormatError(f"The server's answer of {len(body):,} bytes claims a header of {length:,}.")
    return bytes(body[_LENGTH.size : start])


def _bounded_int(text: str) -> int:
    """A number of a header. Thousands of digits would take seconds to multiply, and Python does nothing else then."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _check_depth(form: Any, depth: int = 0) -> None:
    """Refuse what would exhaust the stack of whoever walks through it."""
    if depth > _MAX_DEPTH:
        raise FormatError(f"The server's answer is nested more than {_MAX_DEPTH} deep.")
    if isinstance(form, dict | list):
        for each in form.values() if isinstance(form, dict) else form:
            _check_depth(each, depth + 1)


def _placed(entry: dict[str, Any], start: int, body: memoryview) -> PlacedArray:
    if (problem := find_mismatch(entry, _TENSOR, "a tensor")) is not None:
        raise FormatError(f"The server's answer is not a batch ({problem}).")
    dtype, shape = dtype_from_tag(entry["dtype"]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    is_within = begin <= end <= len(body) - start and len(shape) <= _MAX_DIMENSIONS
    if not is_within or end - begin != math.prod(shape) * dtype.itemsize:
        raise FormatError(
            f"A tensor of the server's answer lies at {begin} to {end}, with the shape {reprlib.repr(shape)}."
        )
    array = PlacedArray(start + begin, shape, dtype_name(dtype), start + end)
    array.view(body)  # refuses what numpy cannot have, such as long dimensions beside an empty one
    return array


def _check_sizes(tensors: dict[str, PlacedArray], num_bytes: int) -> None:
    """Refuse tensors that share bytes: byte strings and nested arrays are copied, and would be more than was sent."""
    claimed = sum(tensor.num_bytes for tensor in tensors.values())
    if claimed > num_bytes:
        raise FormatError(f"The server's answer has {num_bytes:,} bytes of tensors that claim to be {claimed:,}.")


def _placed_ragged(
    values: PlacedArray | PlacedRagged, offsets: PlacedArray, is_bytes: bool, body: memoryview
) -> PlacedRagged:
    """Rows that lie within their values."""
    edges = offsets.view(body)
    is_rising = edges.dtype == np.int64 and edges.ndim == 1 and bool((edges[1:] >= edges[:-1]).all())
    num_values = values.shape[0] if isinstance(values, PlacedArray) else values.offsets.shape[0] - 1
    is_within = is_rising and len(edges) and edges[0] >= 0 and edges[-1] <= num_values
    if not is_within or (is_bytes and (not isinstance(values, PlacedArray) or values.dtype != "uint8")):
        raise FormatError("Rows of uneven length in the server's answer do not lie within their values.")
    return PlacedRagged(values, offsets, is_bytes)


def _build(form: dict[str, Any], tensors: dict[str, PlacedArray], body: memoryview, *, is_inside: bool = False) -> Any:
    """What a form describes, with copies of the arrays inside others. Tensors are taken out: each is there once."""
    kind = next(iter(form))
    inside = functools.partial(_build, tensors=tensors, body=body, is_inside=True)
    match kind:
        case "tensor":
            array = tensors.pop(form["tensor"])
            return array.view(body).copy() if is_inside else array
        case "ragged":
            values, offsets = (tensors.pop(f"{form['ragged']}.{part}") for part in ("values", "offsets"))
            ragged = _placed_ragged(values, offsets, bool(form["bytes"]), body)
            if not is_inside:
                return ragged
            return Ragged(values.view(body).copy(), offsets.view(body).copy(), ragged.is_bytes)
        case "strings":
            name = form["strings"]
            values, edges, offsets = (tensors.pop(f"{name}.{part}") for part in ("values", "strings", "offsets"))
            nested = _placed_ragged(_placed_ragged(values, edges, True, body), offsets, False, body)
            if not is_inside:
                return nested
            strings = Ragged(values.view(body).copy(), edges.view(body).copy(), is_bytes=True)
            return Ragged(strings, offsets.view(body).copy())
        case "raw":
            return tensors.pop(form["raw"]).view(body).tobytes()
        case "dict":
            return {key: inside(each) for key, each in form["dict"].items()}
        case "list":
            return [inside(each) for each in form["list"]]
        case "tuple":
            return tuple(inside(each) for each in form["tuple"])
        case "json":
            return form["json"]
    raise FormatError(
        f"The server's answer has a part of kind {reprlib.repr(kind)}, which this Penstock does not know."
    )
