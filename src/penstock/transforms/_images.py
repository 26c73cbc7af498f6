"""Encoded images to pixels, to smaller JPEGs, or checked and left as they are.

The decoder is Pillow (libjpeg-turbo). The header is read first, and an image with more pixels than `max_pixels`
is a bad row before a byte of it is decoded; so is one that is corrupt, cut short, or of a format that is not on the
list (Pillow has decoders that start other programs). A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size when
twice the wanted size is left ("draft": the scaling is part of the decoding, 2.8 times faster from 3000x2250 to 224).

What comes out is RGB, or grey with `channels=1`: transparency is dropped, palettes and CMYK are converted, the first
frame of an animation is taken. Pixels of more than 8 bits are refused, for no scaling of them is right for all.
The EXIF orientation is applied by default, so that pixels stand as a viewer shows them; torchvision's ImageFolder
does not do that, and `orientation="ignore"` gives what it gives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.errors import check_choice
from penstock.transforms._image_decoder import FILTERS, ImageSettings
from penstock.transforms._images_open import OpenDecodeImage, made_columns
from penstock.transforms._keep import Keep, check_keep, infer_types
from penstock.transforms._transforms import OpenTransform

if TYPE_CHECKING:
    from penstock.sources import Records

VERSION = 1
DEFAULT_MAX_PIXELS = 89_478_485
"""Pillow's own limit, 256 MB of RGB; it warns above it, and so this is also the largest there is."""
Mode = Literal["resize", "crop", "keep"]
Store = Literal["pixels", "jpeg", "as_is"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeImage:
    """Turn a column of encoded images into pixels, or into JPEGs.

    Raises:
        ValueError: choices that do not go together.
        MissingExtra: on opening, when Pillow is not installed.

    >>> DecodeImage(size=224, keep={"label": "int64"}).columns()
    {'image': 'uint8[224,224,3]', 'label': 'int64'}
    """

    size: int | tuple[int, int] | None = None
    """Height and width, or one number for both; not with mode="keep"."""
    mode: Mode = "resize"
    """"resize" bends to `size`; "crop" scales the short side and cuts the centre; "keep" leaves the size alone."""
    store: Store = "pixels"
    """"pixels" is fastest to train from; "jpeg" is re-encoded, and far smaller; "as_is" keeps the bytes, checked."""
    column: str = "image"
    """Column with the encoded images, and name of the column written."""
    keep: Keep | None = None
    """Other columns to store; None keeps `label` where the source has one."""
    max_pixels: int = DEFAULT_MAX_PIXELS
    """Larger images are bad rows."""
    quality: int = 90
    """Of re-encoded JPEGs, 1 to 95."""
    channels: Literal[1, 3] = 3
    """3 for RGB, 1 for grey."""
    filter: Literal["nearest", "box", "bilinear", "bicubic", "lanczos"] = "bilinear"
    """How pixels are averaged when the size changes; the finer ones cost more."""
    orientation: Literal["apply", "ignore"] = "apply"
    """What to do with the EXIF orientation; stored bytes "as_is" keep theirs."""
    draft: bool = True
    """Whether large JPEGs may be decoded at a fraction of their size; differs from a full decode by rounding."""
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
        pairs = check_keep(self.keep or (), made_columns(self.settings))
        if self.keep is not None and all(spec for _, spec in pairs):
            object.__setattr__(self, "_types", dict(pairs))

    def _check_size(self) -> None:
        is_kept = self.mode == "keep" or self.store == "as_is"
        if self.store == "as_is" and self.mode != "keep":
            raise ValueError(f"store='as_is' leaves the bytes alone; write mode='keep' with it, not {self.mode!r}.")
        if is_kept != (self.size is None):
            raise ValueError(f"mode={self.mode!r} with size={self.size}; 'resize' and 'crop' need a size, 'keep' none.")
        height, width = self.settings.size or (1, 1)
        if type(height) is not int or type(width) is not int or min(height, width) < 1:
            raise ValueError(f"size={self.size}; height and width are numbers from 1.")

    @property
    def settings(self) -> ImageSettings:
        """What the decoder is told."""
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
        """Every option; not the version of Pillow, whose pixels have been the same for years."""
        keep = None if self.keep is None else [list(pair) for pair in check_keep(self.keep, ())]
        return {"transform": "DecodeImage", "version": VERSION, **self.settings.to_json(), "keep": keep}

    @property
    def attributes(self) -> dict[str, Any]:
        """How the images are stored."""
        settings = self.settings.to_json()
        return {"images": {key: settings[key] for key in ("column", "size", "mode", "store", "channels")}}

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing to say."""
        return ()

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """The image and what is kept; all while that is open."""
        return None if self.keep is None else (self.column, *self.keep)

    def columns(self) -> dict[str, str] | None:
        """The image, its shape where sizes differ, and what is kept."""
        return None if self._types is None else {**made_columns(self.settings), **self._types}

    def before_run(self, sample: Iterable[Records]) -> DecodeImage:
        """The same, with the kept columns and their types known from the first records."""
        first = next((records for records in sample if records.num_rows), None)
        if self._types is not None or first is None:
            return self
        names = [name for name in ("label",) if name in first.columns] if self.keep is None else self.keep
        ready = copy.copy(self)
        object.__setattr__(ready, "_types", infer_types(check_keep(names, ()), first))
        return ready

    def open(self) -> OpenTransform:
        """The decoder at work."""
        return OpenDecodeImage(self)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}={value!r}; a number from {low:,} to {high:,}.")
