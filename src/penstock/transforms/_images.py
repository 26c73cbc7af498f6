"""`DecodeImage`: encoded images to pixels, to smaller JPEGs, or checked and stored unchanged.

    bytes -> header: pixel limit, format -> draft decode -> turn upright -> scale -> pixels | JPEG     (_image_decoder)
    a row that fails on the way is a bad row; the others are stacked into one array, or listed         (here)

Images come out as RGB, or grey with `channels=1`: transparency is dropped, palettes and CMYK are converted, and only
the first frame of an animation is used. Colours of 16 bits come as their upper 8, as Pillow and viewers give them; grey
of more than 8 bits and floats are refused, because no single scaling suits all.
The EXIF orientation is applied by default, so images are upright, as in a viewer; torchvision's ImageFolder
ignores it, and so does `orientation="ignore"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import check_choice
from penstock.schema import Ragged
from penstock.sources import Records
from penstock.transforms._image_decoder import FILTERS, ImageDecoder, ImageSettings, quiet_decoding
from penstock.transforms._keep import Keep, Keeping, OpenKeeping
from penstock.transforms._transform import BadRows, OpenTransform, apply, list_encoded

FIRST_FRAMES = "animations_of_which_only_the_first_frame_was_taken"
VERSION = 1
_SHAPE_SUFFIX = "_shape"
DEFAULT_MAX_PIXELS = 89_478_485
"""Pillow's own limit, 256 MB of RGB. Pillow warns above it, so this is also the largest that can be set."""
Mode = Literal["resize", "crop", "keep"]
Store = Literal["pixels", "jpeg", "as_is"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeImage(Keeping):
    """Turn a column of encoded images into pixels or JPEGs.

    Raises:
        ValueError: the options do not go together.
        MissingExtra: on opening, if Pillow is not installed.

    >>> DecodeImage(size=224, keep={"label": "int64"}).columns()
    {'image': 'uint8[224,224,3]', 'label': 'int64'}
    """

    size: int | tuple[int, int] | None = None
    """Height and width, or one number for both; not with `mode="keep"`."""
    mode: Mode = "resize"
    """"resize" stretches to `size`; "crop" scales the short side and cuts out the centre; "keep" keeps the size."""
    store: Store = "pixels"
    """"pixels" is fastest to train from; "jpeg" re-encodes, far smaller; "as_is" only checks the bytes."""
    column: str = "image"
    """Column with the encoded images, and name of the column written."""
    keep: Keep | None = None
    """Other columns to store; None keeps `label` if the source has one."""
    max_pixels: int = DEFAULT_MAX_PIXELS
    """Larger images are bad rows."""
    quality: int = 90
    """Quality of re-encoded JPEGs, 1 to 95."""
    channels: Literal[1, 3] = 3
    """3 for RGB, 1 for grey."""
    filter: Literal["nearest", "box", "bilinear", "bicubic", "lanczos"] = "bilinear"
    """How pixels are averaged when the size changes; better ones cost more."""
    orientation: Literal["apply", "ignore"] = "apply"
    """What to do with the EXIF orientation; images stored "as_is" keep theirs."""
    draft: bool = True
    """Whether large JPEGs may be decoded at a fraction of their size; pixels differ slightly from a full decode."""
    _types: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("store", self.store, get_args(Store))
        check_choice("filter", self.filter, tuple(FILTERS))
        check_choice("orientation", self.orientation, ("apply", "ignore"))
        check_choice("channels", self.channels, (1, 3))
        self._check_size()
        _check_range("max_pixels", self.max_pixels, 1, DEFAULT_MAX_PIXELS)
        _check_range("quality", self.quality, 1, 95)
        self.check_kept(_made_columns(self.settings))

    def _check_size(self) -> None:
        if self.store == "as_is" and self.mode != "keep":
            raise ValueError(f"store='as_is' leaves the bytes alone; write mode='keep' with it, not {self.mode!r}.")
        if (self.mode == "keep") != (self.size is None):
            raise ValueError(f"mode={self.mode!r} with size={self.size}; 'resize' and 'crop' need a size, 'keep' none.")
        height, width = self.settings.size or (1, 1)
        if type(height) is not int or type(width) is not int or min(height, width) < 1:
            raise ValueError(f"size={self.size}; height and width must be integers of at least 1.")

    @property
    def settings(self) -> ImageSettings:
        """The options in the form that the decoder takes."""
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        return ImageSettings(
            column=self.column,
            size=size and (size[0], size[1]),
            mode=self.mode,
            store=self.store,
            max_pixels=self.max_pixels,
            quality=self.quality,
            channels=self.channels,
            filter=self.filter,
            is_turned=self.orientation == "apply",
            is_drafted=self.draft,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Every option; not the version of Pillow, whose pixels have not changed for years."""
        return {
            "transform": "DecodeImage",
            "version": VERSION,
            **self.settings.to_json(),
            "keep": self.kept_identity,
        }

    @property
    def attributes(self) -> dict[str, Any]:
        settings = self.settings.to_json()
        return {"images": {key: settings[key] for key in ("column", "size", "mode", "store", "channels")}}

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """The image and what is kept; all columns until that is known."""
        return None if self.keep is None else (self.column, *self.keep)

    def columns(self) -> dict[str, str] | None:
        """The image, its shape if sizes differ, and kept columns."""
        return None if self._types is None else {**_made_columns(self.settings), **self._types}

    def choose_kept(self, first: Records) -> Keep:
        """The label, unless columns are named."""
        return [name for name in ("label",) if name in first.columns] if self.keep is None else self.keep

    def open(self) -> OpenTransform:
        return _OpenDecodeImage(self)


class _OpenDecodeImage(OpenKeeping):
    """Turns encoded images into what the settings say: one array, or a list of byte strings."""

    def __init__(self, transform: DecodeImage) -> None:
        super().__init__(transform)
        self._settings = transform.settings
        self._decoder = ImageDecoder(self._settings)

    def make(self, records: Records, bad: BadRows) -> tuple[dict[str, Any], dict[str, int]]:
        before = self._decoder.num_animations
        with quiet_decoding(self._decoder.pillow):
            made = self._make(list_encoded(records, self._settings.column, bad), bad)
        num_animations = self._decoder.num_animations - before
        return made, {FIRST_FRAMES: num_animations} if num_animations else {}

    def _make(self, images: list[memoryview], bad: BadRows) -> dict[str, Any]:
        name = self._settings.column
        if self._settings.store == "as_is":
            return {name: list(self._apply(self._decoder.check, images, bad))}
        decoded = self._apply(self._decoder.decode, images, bad)
        if self._settings.store == "jpeg":
            return {name: [self._decoder.encode_jpeg(image) for image in decoded]}
        if self._settings.size is None:
            return self._flatten(decoded)
        shape = (*self._settings.size, self._settings.channels)
        return {name: _stack(decoded, np.empty((len(images), *shape), np.uint8))}

    def _apply(self, work: Callable[[memoryview], Any], images: list[memoryview], bad: BadRows) -> Iterator[Any]:
        return apply(work, images, bad, f"Column {self._settings.column!r} is not a usable image")

    def _flatten(self, decoded: Iterator[Any]) -> dict[str, Any]:
        arrays: list[NDArray[np.uint8]] = [np.asarray(image) for image in decoded]
        shapes = np.array([(*array.shape, 1)[:3] for array in arrays], np.int32).reshape(-1, 3)
        values = np.concatenate([np.empty(0, np.uint8), *(array.reshape(-1) for array in arrays)])
        name = self._settings.column
        return {name: Ragged.from_lengths(values, [array.size for array in arrays]), name + _SHAPE_SUFFIX: shapes}


def _stack(decoded: Iterator[Any], stacked: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Stack images in an array that may have room for more."""
    count = 0
    for image in decoded:
        stacked[count] = np.asarray(image).reshape(stacked.shape[1:])
        count += 1
    return stacked[:count]


def _made_columns(settings: ImageSettings) -> dict[str, str]:
    """Columns that the settings write, with their types."""
    if settings.store != "pixels":
        return {settings.column: "bytes"}
    if settings.size is None:
        # A ragged column has one free dimension, an image two: store its bytes flat, and its shape beside them.
        return {settings.column: "uint8[*]", settings.column + _SHAPE_SUFFIX: "int32[3]"}
    height, width = settings.size
    return {settings.column: f"uint8[{height},{width},{settings.channels}]"}


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}={value!r}; it must be a number from {low:,} to {high:,}.")
