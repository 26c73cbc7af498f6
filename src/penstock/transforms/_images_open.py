"""Decoding at work in one process: a batch of rows into one array, or a list of JPEGs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.schema import Ragged, offsets_of
from penstock.transforms._image_decoder import BadImage, ImageDecoder, ImageSettings, quiet_decoding
from penstock.transforms._keep import read_kept, take_kept
from penstock.transforms._rows import BadRows, find_column, is_arrow, read_byte_column, row_bytes
from penstock.transforms._transforms import Output

if TYPE_CHECKING:
    from penstock.sources import Records
    from penstock.transforms._images import DecodeImage

_SHAPE_SUFFIX = "_shape"


def made_columns(settings: ImageSettings) -> dict[str, str]:
    """Columns that the settings write, with their types."""
    if settings.store != "pixels":
        return {settings.column: "bytes"}
    if settings.size is None:
        # A ragged column has one free dimension, an image two: its bytes in a row, and its shape beside them.
        return {settings.column: "uint8[*]", settings.column + _SHAPE_SUFFIX: "int32[3]"}
    height, width = settings.size
    return {settings.column: f"uint8[{height},{width},{settings.channels}]"}


class OpenDecodeImage:
    """Encoded images to what the settings ask for."""

    def __init__(self, transform: DecodeImage) -> None:
        self._transform = transform
        self._settings = transform.settings
        self._decoder = ImageDecoder(self._settings)

    def __call__(self, records: Records) -> Output:
        """Images of these rows, and what is kept beside them."""
        self._transform = self._transform.before_run([records])
        columns = self._transform.columns() or {}
        types = {name: spec for name, spec in columns.items() if name not in made_columns(self._settings)}
        bad = BadRows(records)
        kept = read_kept(records, types, bad)
        images = _list_images(records, self._settings.column, bad)
        with quiet_decoding(self._decoder.pillow):
            made = self._make(images, bad)
        places = bad.good_places()
        return Output({**made, **take_kept(kept, places, records.num_rows)}, places, bad.errors())

    def _make(self, images: list[memoryview], bad: BadRows) -> dict[str, Any]:
        if self._settings.store == "as_is":
            return {self._settings.column: self._check_all(images, bad)}
        if self._settings.store == "jpeg":
            return {self._settings.column: self._encode_all(images, bad)}
        return self._stack(images, bad) if self._settings.size else self._flatten(images, bad)

    def _check_all(self, images: list[memoryview], bad: BadRows) -> list[bytes]:
        checked = []
        for place, encoded in enumerate(images):
            if place not in bad and self._try(self._decoder.check, encoded, place, bad) is not _FAILED:
                checked.append(bytes(encoded))
        return checked

    def _encode_all(self, images: list[memoryview], bad: BadRows) -> list[bytes]:
        decoded = (self._decode(encoded, place, bad) for place, encoded in enumerate(images))
        return [self._decoder.encode_jpeg(image) for image in decoded if image is not None]

    def _stack(self, images: list[memoryview], bad: BadRows) -> dict[str, Any]:
        assert self._settings.size is not None
        shape = (*self._settings.size, self._settings.channels)
        stacked = np.empty((len(images), *shape), np.uint8)
        count = 0
        for place, encoded in enumerate(images):
            image = self._decode(encoded, place, bad)
            if image is not None:
                stacked[count] = np.asarray(image).reshape(shape)
                count += 1
        return {self._settings.column: stacked[:count]}

    def _flatten(self, images: list[memoryview], bad: BadRows) -> dict[str, Any]:
        decoded = (self._decode(encoded, place, bad) for place, encoded in enumerate(images))
        arrays: list[NDArray[np.uint8]] = [np.asarray(image) for image in decoded if image is not None]
        shapes = np.array([(*array.shape, 1)[:3] for array in arrays], np.int32).reshape(-1, 3)
        values = np.concatenate([np.empty(0, np.uint8), *(array.reshape(-1) for array in arrays)])
        offsets = offsets_of(np.array([array.size for array in arrays], np.int64))
        name = self._settings.column
        return {name: Ragged(values, offsets), name + _SHAPE_SUFFIX: shapes}

    def _decode(self, encoded: memoryview, place: int, bad: BadRows) -> Any | None:
        """The image, or None when the row is bad."""
        if place in bad:
            return None
        image = self._try(self._decoder.decode, encoded, place, bad)
        return None if image is _FAILED else image

    def _try(self, work: Any, encoded: memoryview, place: int, bad: BadRows) -> Any:
        try:
            return work(encoded)
        except BadImage as error:
            bad.add(place, error.reason, f"Column {self._settings.column!r} holds no usable image: {error}.")
            return _FAILED


_FAILED = object()


def _list_images(records: Records, name: str, bad: BadRows) -> list[memoryview]:
    """Encoded images one by one, not copied."""
    column = find_column(records, name)
    rows = read_byte_column(name, _unwrap(name, column, bad) if is_arrow(column) else column, bad)
    return [row_bytes(rows, place) for place in range(len(rows))]


def _unwrap(name: str, column: Any, bad: BadRows) -> Any:
    """The bytes of a column; Hugging Face keeps an image as `{"bytes": …, "path": …}`, and may have only the path."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
        return column
    encoded = pc.struct_field(column, "bytes")
    if encoded.null_count and column.type.get_field_index("path") >= 0:
        for place, path in enumerate(pc.struct_field(column, "path").to_pylist()):
            if path is not None and not encoded[place].is_valid:
                bad.add(place, "null", f"Column {name!r} has no bytes but the path {path!r}. Give the image files.")
    return encoded
