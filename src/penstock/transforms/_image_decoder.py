"""One encoded image through Pillow (libjpeg-turbo): header, limit, draft, decode, turn, scale.

The header is read first: an image with more pixels than `max_pixels` is refused before a byte of it is decoded, and so
is a format that is not on the list (some of Pillow's decoders start other programs). So is a JPEG with so many scans
that decoding would take minutes: each scan goes over all pixels, but may take only a few bytes; and a small TIFF in
huge tiles. A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size as long as that leaves twice the wanted size
("draft": scaling is part of decoding, 2.8 times faster from 3000x2250 to 224).
"""

import importlib
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from penstock.errors import MissingExtra
from penstock.transforms._transform import BadValue

# Formats whose decoders are part of Pillow or of libraries it ships; PostScript, for example, would start Ghostscript.
_PLUGINS = {
    "JPEG": "Jpeg",
    "MPO": "Mpo",
    "PNG": "Png",
    "WEBP": "WebP",
    "GIF": "Gif",
    "BMP": "Bmp",
    "TIFF": "Tiff",
    "PPM": "Ppm",
    "AVIF": "Avif",
    "JPEG2000": "Jpeg2K",
}
FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4}
_EIGHT_BIT = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"})
_ORIENTATION_TAG = 0x0112
_TILE_TAGS = (322, 323)
_DRAFT_GAP = 2
_SMALLEST = (1, 1)
_MAX_SCANS = 1000
_MAX_SCANNED_PIXELS = 16 * 89_478_485
"""Pixels times scans, about two seconds of work: sixteen scans of the largest image. Encoders write about ten."""
_NEXT_MARKER = re.compile(b"\xff[^\x00\xd0-\xd7\xff]")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """What to do with every image: the options of `DecodeImage`, checked and normalised."""

    column: str
    size: tuple[int, int] | None
    """Height and width."""
    mode: str
    store: str
    max_pixels: int
    quality: int
    channels: int
    filter: str
    is_turned: bool
    is_drafted: bool

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "size": self.size and list(self.size)}


def import_pillow() -> Any:
    """Pillow's `Image` module.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise MissingExtra("Decoding images needs Pillow: pip install 'penstock-data[images]'.") from None


def _load_formats(pillow: Any) -> list[str]:
    """Formats that this build of Pillow can decode; importing a plugin registers its format."""
    for plugin in _PLUGINS.values():
        importlib.import_module(f"PIL.{plugin}ImagePlugin")
    return [name for name in _PLUGINS if name in pillow.OPEN]


@contextmanager
def quiet_decoding(pillow: Any) -> Iterator[None]:
    """Silence warnings about broken metadata; turn the one about decompression bombs into an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        yield


class ImageDecoder:
    """Decodes with one set of settings; call it inside `quiet_decoding`."""

    def __init__(self, settings: ImageSettings) -> None:
        self.pillow = import_pillow()
        self._formats = _load_formats(self.pillow)
        self._settings = settings
        self._mode = "RGB" if settings.channels == 3 else "L"
        self._filter = FILTERS[settings.filter]
        self.num_animations = 0
        """Images decoded so far that have more than one frame, of which only the first is taken."""

    def decode(self, encoded: bytes | memoryview) -> Any:
        """The image, decoded, turned and scaled.

        Raises:
            BadValue: it is corrupt, too large, or of a kind that is not supported.
        """
        with _wrap_failures(self.pillow):
            image = self._open(encoded)
            turn = self._find_turn(image)
            is_animation = _is_animation(image)
            self._draft(image, turn)
            image = self._scale(_convert(image, self._mode), turn)
            self.num_animations += is_animation
            return image if turn is None else image.transpose(turn)

    def check(self, encoded: bytes | memoryview) -> bytes:
        """The bytes themselves, after decoding them as small as their format allows.

        Raises:
            BadValue: as from `decode`.
        """
        with _wrap_failures(self.pillow):
            image = self._open(encoded)
            image.draft(None, _SMALLEST)
            image.load()
        return bytes(encoded)

    def measure(self, encoded: bytes | memoryview) -> tuple[int, int]:
        """Height and width of the image when upright, from its header.

        Raises:
            BadValue: as from `decode`, but damage behind the header goes unnoticed.
        """
        with _wrap_failures(self.pillow):
            image = self._open(encoded)
            turn = self._find_turn(image)
        return _turned(image.size[::-1], turn)

    def encode_jpeg(self, image: Any) -> bytes:
        """A JPEG of the chosen quality."""
        file = io.BytesIO()
        image.save(file, "JPEG", quality=self._settings.quality)
        return file.getvalue()

    def _open(self, encoded: bytes | memoryview) -> Any:
        if not len(encoded):
            raise BadValue("corrupt_image", "no bytes")
        image = self.pillow.open(io.BytesIO(encoded), formats=self._formats)
        num_pixels = image.size[0] * image.size[1]
        if num_pixels > self._settings.max_pixels:
            raise _too_large(f"{image.size[0]} x {image.size[1]} is {num_pixels:,} pixels", self._settings.max_pixels)
        if image.format == "TIFF":
            _check_tiles(image, self._settings.max_pixels)
        if image.mode not in _EIGHT_BIT:
            raise BadValue(
                "unsupported_image", f"pixels of mode {image.mode!r}, not of 8 bits; scale them with a function"
            )
        if image.format in ("JPEG", "MPO"):
            _check_scans(bytes(encoded), num_pixels)
        return image

    def _find_turn(self, image: Any) -> Any:
        """Transposition that the EXIF orientation calls for; None if the image is upright."""
        if not self._settings.is_turned or not _may_have_exif(image):
            return None
        turns = self.pillow.Transpose
        table = {
            2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE,
            6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90,
        }  # fmt: skip
        return table.get(image.getexif().get(_ORIENTATION_TAG))

    def _target(self, turn: Any) -> tuple[int, int]:
        """Width and height before the image is turned."""
        assert self._settings.size is not None
        height, width = _turned(self._settings.size, turn)
        return width, height

    def _draft(self, image: Any, turn: Any) -> None:
        if self._settings.is_drafted and self._settings.size is not None and image.format in ("JPEG", "MPO"):
            width, height = self._target(turn)
            image.draft(None, (_DRAFT_GAP * width, _DRAFT_GAP * height))

    def _scale(self, image: Any, turn: Any) -> Any:
        if self._settings.size is None:
            return image
        target = self._target(turn)
        box = _centre_box(image.size, target) if self._settings.mode == "crop" else None
        return image.resize(target, self._filter, box)


def _turned(size: tuple[int, int], turn: Any) -> tuple[int, int]:
    """Height and width after a transposition."""
    swaps = turn is not None and turn.name in ("TRANSPOSE", "TRANSVERSE", "ROTATE_90", "ROTATE_270")
    return (size[1], size[0]) if swaps else size


def _centre_box(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float, float, float]:
    """Largest centred part of the image with the aspect ratio of the target."""
    scale = min(size[0] / target[0], size[1] / target[1])
    width, height = target[0] * scale, target[1] * scale
    left, top = max(0.0, (size[0] - width) / 2), max(0.0, (size[1] - height) / 2)
    return left, top, min(size[0], left + width), min(size[1], top + height)


def _is_animation(image: Any) -> bool:
    """Whether an image has more than one frame; MPO does not count: cameras store previews as further frames."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except (OSError, EOFError, SyntaxError, ValueError):  # broken after the first frame, the only one we use
        return False


def _convert(image: Any, mode: str) -> Any:
    image.load()
    return image if image.mode == mode else image.convert(mode)


def _may_have_exif(image: Any) -> bool:
    # Asking for EXIF parses it; for JPEG and WebP the header already says whether there is any.
    return image.format not in ("JPEG", "WEBP") or "exif" in image.info


def _check_tiles(image: Any, max_pixels: int) -> None:
    """Refuse a TIFF whose tiles are larger than an image may be: each is decoded whole, however little is used."""
    width, height = (image.tag_v2.get(tag, 1) for tag in _TILE_TAGS)
    if width * height > max_pixels:
        raise _too_large(f"tiles of {width} x {height} are {width * height:,} pixels", max_pixels)


def _check_scans(encoded: bytes, num_pixels: int) -> None:
    limit = min(_MAX_SCANS, _MAX_SCANNED_PIXELS // max(1, num_pixels))
    if encoded.count(b"\xff\xda") <= limit:  # includes those in a thumbnail
        return
    num_scans = _count_scans(encoded, limit)
    if num_scans > limit:
        raise BadValue("too_many_scans", f"more than {limit:,} scans of {num_pixels:,} pixels")


def _count_scans(encoded: bytes, limit: int) -> int:
    """Scans of the first image in a JPEG file, counted up to the limit."""
    num_scans, place = 0, 2
    while num_scans <= limit and (found := _NEXT_MARKER.search(encoded, place)):
        marker = encoded[found.start() + 1]
        if marker == _END_OF_IMAGE:
            break
        num_scans += marker == _START_OF_SCAN
        place = found.end() + int.from_bytes(encoded[found.end() : found.end() + 2], "big")
    return num_scans


def _too_large(found: str, limit: int) -> BadValue:
    return BadValue("too_many_pixels", f"{found}; max_pixels allows {limit:,}")


@contextmanager
def _wrap_failures(pillow: Any) -> Iterator[None]:
    """Turn whatever a decoder raises into `BadValue`."""
    try:
        yield
    except (BadValue, MemoryError):
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise BadValue("too_many_pixels", str(error)) from None
    except Exception as error:  # noqa: BLE001 (decoders raise nearly anything on broken input)
        raise BadValue("corrupt_image", f"{type(error).__name__}: {_shorten(error)}") from None


def _shorten(error: Exception) -> str:
    # "cannot identify image file <_io.BytesIO object at 0x7f…>" differs from run to run.
    return str(error).partition(" <_io.")[0][:200]
