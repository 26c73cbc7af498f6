"""Pictures in conversations: found in the messages, fetched, measured, and given their places in the text.

    messages -> take: parts of type "image" -> bytes (in the row, under a root) -> size, by the header
             -> bare parts, for the chat template -> its text -> expand: a placeholder becomes the processor's tokens

A row names its pictures as Hugging Face's datasets and processors do: bytes, `{"bytes", "path"}`, a path, a URL,
base64, or bare parts beside a column of pictures. Whoever wrote the rows must not choose which files of the machine are
read: a path counts from `media_root` and stays below it; without a root, only bytes are taken.

What is broken behind its header is found when it is decoded, in training. Sounds and films are refused by name.
"""

import base64
import binascii
import os
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from penstock.errors import PenstockError
from penstock.sources import read_file
from penstock.transforms._image_decoder import ImageDecoder, quiet_decoding
from penstock.transforms._images import DecodeImage
from penstock.transforms._processors import Expansion, expansion_identity
from penstock.transforms._special_tokens import strip_marks
from penstock.transforms._transform import BadValue

MAX_PICTURE_BYTES = 256 << 20
_PICTURES = ("image", "image_url")
_OTHERS = ("audio", "audio_url", "input_audio", "video", "video_url")
_SOURCES = ("image", "url", "path", "image_url")


@dataclass(frozen=True, slots=True)
class Picture:
    """One encoded picture, and its size when upright."""

    encoded: bytes
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class PictureSettings:
    """Where pictures are, and what they become; picklable."""

    expansion: Expansion
    root: str | None
    column: str | None
    """A column with the pictures of bare parts."""
    max_pixels: int

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the output."""
        return {
            "expansion": expansion_identity(self.expansion),
            "media_root": self.root,
            "images_column": self.column,
            "max_pixels": self.max_pixels,
        }

    def columns(self) -> dict[str, str]:
        """The columns that samples get."""
        made = {"images": "bytes[*]", "image_sizes": "int64[*,2]"}
        return made | ({} if self.expansion.grid(28, 28) is None else {"image_grid_thw": "int64[*,3]"})

    def collect(self, rows: list[tuple[Picture, ...]]) -> dict[str, Any]:
        """The values of those columns."""
        sizes = [np.array([(each.height, each.width) for each in row], np.int64).reshape(-1, 2) for row in rows]
        columns: dict[str, Any] = {"images": [[each.encoded for each in row] for row in rows], "image_sizes": sizes}
        if "image_grid_thw" in self.columns():
            grids = [[self.expansion.grid(each.height, each.width) for each in row] for row in rows]
            columns["image_grid_thw"] = [np.array(each, np.int64).reshape(-1, 3) for each in grids]
        return columns


class PictureReader:
    """Takes the pictures out of conversations."""

    def __init__(self, settings: PictureSettings) -> None:
        self._settings = settings
        self._decoder = ImageDecoder(DecodeImage(mode="keep", store="as_is", max_pixels=settings.max_pixels).settings)

    def take(self, messages: list[dict[str, Any]], beside: Any) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
        """The messages with bare parts, and their pictures in order; `beside` are those of the row's own column.

        Raises:
            BadValue: a picture is missing, broken or too large, or a part is of another kind.
        """
        waiting = iter(_listed(beside))
        found: list[Picture] = []
        bare = [self._take(message, waiting, found) for message in messages]
        if next(waiting, None) is not None:
            raise BadValue(
                "missing_image", f"Column {self._settings.column!r} has more pictures than the messages have parts."
            )
        return bare, tuple(found)

    def _take(self, message: dict[str, Any], waiting: Iterator[Any], found: list[Picture]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _OTHERS:
                raise BadValue("unsupported_media", f"A message has a part of type {kind!r}; pictures are read.")
            if kind in _PICTURES:
                found.append(self._read(_source_of(part, waiting), len(found)))
                part = {"type": "image"}
            parts.append(part)
        return {**message, "content": parts}

    def _read(self, source: Any, number: int) -> Picture:
        encoded = self._fetch(source, number)
        try:
            with quiet_decoding(self._decoder.pillow):
                height, width = self._decoder.measure(encoded)
            self._settings.expansion.text(height, width)
        except BadValue as error:
            raise BadValue(error.reason, f"Picture {number} {_named(source)}: {error}") from None
        except ValueError as error:
            raise BadValue("unsupported_image", f"Picture {number} {_named(source)}: {error}") from None
        return Picture(encoded, height, width)

    def _fetch(self, source: Any, number: int) -> bytes:
        if isinstance(source, Mapping):
            source = source.get("bytes") or source.get("url") or source.get("path")
        if isinstance(source, (bytes, bytearray)) and source:
            return bytes(source)
        if not isinstance(source, str) or not source or "\0" in source:
            raise BadValue("missing_image", f"Picture {number} has neither bytes nor a path.")
        if source.startswith("data:"):
            source = source.partition(",")[2]
            return _decode_base64(source, number)
        path = self._place(source, number)
        try:
            encoded = read_file(path, MAX_PICTURE_BYTES + 1)
        except (OSError, PenstockError) as error:
            raise BadValue("missing_image", f"Picture {number} cannot be read: {error}") from None
        if len(encoded) > MAX_PICTURE_BYTES:
            raise BadValue("image_too_large", f"Picture {number}: {path} has over {MAX_PICTURE_BYTES:,} bytes.")
        return encoded

    def _place(self, source: str, number: int) -> str:
        """Where a path or URL leads, which must be below the root."""
        root = self._settings.root
        if root is None:
            raise BadValue(
                "missing_image",
                f"Picture {number} is the path {source!r:.80}. Say where paths lead: media_root= (--media-root); "
                "nothing outside it is read.",
            )
        if "://" in root:
            path = source if "://" in source else posixpath.join(root, source)
            parts = urlsplit(path)
            clean = parts._replace(path=posixpath.normpath(parts.path)).geturl()
            is_below = "::" not in path and clean.startswith(root.rstrip("/") + "/")
        else:
            path = clean = os.path.realpath(os.path.join(root, source.removeprefix("file://")))
            is_below = os.path.commonpath([os.path.realpath(root), path]) == os.path.realpath(root)
        if not is_below:
            raise BadValue(
                "missing_image",
                f"Picture {number}, {source!r:.80}, is not below media_root={root!r}, so it is not read.",
            )
        return clean


def _listed(beside: Any) -> list[Any]:
    if beside is None:
        return []
    return list(beside) if isinstance(beside, (list, tuple)) else [beside]


def _source_of(part: Mapping[str, Any], waiting: Iterator[Any]) -> Any:
    if isinstance(part.get("base64"), str):
        return f"data:;base64,{part['base64']}"
    given = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    return next(waiting, None) if given is None else given


def _decode_base64(text: str, number: int) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadValue("corrupt_image", f"Picture {number} is not base64: {error}.") from None


def _named(source: Any) -> str:
    name = source.get("path") if isinstance(source, Mapping) else source
    return f"({name!r:.80})" if isinstance(name, str) and not name.startswith("data:") else "(in the row)"


def expand(text: str, spans: tuple[tuple[int, int], ...], placeholder: str, said: list[str]) -> tuple[str, Any]:
    """A text with each placeholder replaced by what the processor says, and spans moved along.

    Raises:
        BadValue: the template wrote another number of placeholders than there are pictures.
    """
    pieces = text.split(placeholder)
    if len(pieces) - 1 != len(said):
        raise BadValue(
            "chat_template",
            f"The chat template wrote {len(pieces) - 1} placeholders {strip_marks(placeholder)!r} for "
            f"{len(said)} pictures. Use the template of this processor, and parts of type 'image'.",
        )
    grown = "".join(piece + each for piece, each in zip(pieces, [*said, ""], strict=True))
    ends = np.cumsum([len(piece) + len(placeholder) for piece in pieces[:-1]], dtype=np.int64)
    added = np.concatenate([[0], np.cumsum([len(each) - len(placeholder) for each in said], dtype=np.int64)])

    def move(place: int) -> int:
        return place + int(added[np.searchsorted(ends, place, side="right")])

    return grown, tuple((move(begin), move(end)) for begin, end in spans)
