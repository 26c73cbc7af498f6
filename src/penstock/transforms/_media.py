"""Films and sounds: indexed when they are prepared, decoded clip by clip when their row is due.

    prepare   bytes -> demux, without decoding -> times of all frames, which of them are keyframes  (`IndexVideo`)
    map       a clip: numbers of frames -> the keyframe before each -> decode from there            (`DecodeClip`)

A clip needs a few of a film's bytes. So a map that decodes clips names its column in `opened_columns` and gets a file
in place of the bytes: the container's tables, and the packets from a keyframe on, are all that is read. As the times of
its frames are stored, a clip is exact without looking through the film, even where frames come at uneven times or the
container's own table of keyframes is wrong: what is not found after a jump is decoded from the beginning.

PyAV decodes. torchcodec 0.13 gives the same pixels to the bit (a test compares them) and takes less time for a short
film: 0.06 s for a clip to PyAV's 0.15, on a busy machine (benchmarks/bench_media.py). But it needs ffmpeg's libraries
on the machine, a release that fits torch's, and torch even on a server, and cannot index a film without decoding it or
calling ffprobe. A decoder is made for each clip, in the process that decodes it, so none crosses a fork; it uses one
thread, as there are workers.

Whoever made the film must not choose what is opened: playlists and other formats that refer to files are refused.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtra, SchemaError, check_choice
from penstock.sources import Records
from penstock.transforms._keep import Keep, Keeping, OpenKeeping
from penstock.transforms._transform import BadRows, BadValue, OpenTransform, apply, list_encoded

_FORMATS = "mov,mp4,matroska,webm,avi,flv,mpegts,mpeg,asf,wav,w64,aiff,au,caf,flac,mp3,ogg,aac,ac3,amr"
"""Demuxers that take all they read from the file itself."""
_MAX_PIXELS = 89_478_485
_ROUNDING = 0.5
"""Ticks: a container rounds when a frame comes to whole ones."""
_PREROLL_SECONDS = 0.5
"""A decoder of sound needs some of what comes before: MP3 keeps bits for later frames."""
Start = Literal["random", "centre", "first"]
Row = dict[str, Any]


def _import_av() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError:
        raise MissingExtra("Films and sounds need PyAV: pip install 'penstock-data[media]'.") from None


@contextlib.contextmanager
def _open(encoded: Any, kind: str) -> Iterator[tuple[Any, Any]]:
    """The container in a file or bytes, and its first stream of a kind; `BadValue` for whatever is wrong with it."""
    av = _import_av()
    file = encoded if hasattr(encoded, "read") else io.BytesIO(encoded)
    file.seek(0)
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": ""}
    try:
        with av.open(file, options=options, metadata_errors="replace") as container:
            found = [stream for stream in container.streams if stream.type == kind and not _is_cover(stream)]
            if not found:
                raise BadValue(f"no_{kind}", f"it has no {kind} stream")
            if found[0].codec_context is None:
                raise BadValue(f"unsupported_{kind}", "its codec is not known")
            found[0].codec_context.thread_count = 1
            found[0].codec_context.options = {"max_pixels": str(_MAX_PIXELS)}
            yield container, found[0]
    except (av.FFmpegError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadValue(f"corrupt_{kind}", f"FFmpeg says: {reason:.200}") from None


def _is_cover(stream: Any) -> bool:
    """Whether a stream is a picture of the album."""
    return bool(stream.disposition & type(stream.disposition).attached_pic)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index(Keeping):
    """Stores encoded films or sounds as they are, beside facts about each."""

    column: str
    """Column with the encoded bytes, and name of the column written."""
    keep: Keep | None = None
    """Other columns to store; None keeps `label` if the source has one."""
    _types: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.check_kept(self._made())

    @property
    def identity(self) -> dict[str, Any]:
        return {"transform": type(self).__name__, "version": 1, "column": self.column, "keep": self.kept_identity}

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """The bytes and what is kept; all columns until that is known."""
        return None if self.keep is None else (self.column, *self.keep)

    def choose_kept(self, first: Records) -> Keep:
        """The label, unless columns are named."""
        return [name for name in ("label",) if name in first.columns] if self.keep is None else self.keep

    def columns(self) -> dict[str, str] | None:
        """The bytes, the facts, and kept columns."""
        return None if self._types is None else {**self._made(), **self._types}

    def _made(self) -> dict[str, str]:
        return {self.column: "bytes", **{self.column + suffix: spec for suffix, spec in self.facts.items()}}

    def open(self) -> OpenTransform:
        return _OpenIndex(self)

    @property
    def facts(self) -> Mapping[str, str]:
        """Types of the companion columns, by what comes after the column's name."""
        raise NotImplementedError  # each kind of media has its own

    def examine(self, encoded: memoryview) -> Mapping[str, NDArray[np.int64]]:
        """The facts about one film or sound; `BadValue` if it cannot be used."""
        raise NotImplementedError  # as above


class _OpenIndex(OpenKeeping):
    _transform: _Index

    def make(self, records: Records, bad: BadRows) -> tuple[dict[str, Any], dict[str, int]]:
        name, examine = self._transform.column, self._transform.examine
        encoded = list_encoded(records, name, bad)
        facts = list(apply(examine, encoded, bad, f"Column {name!r} cannot be used"))
        made: dict[str, Any] = {name: [bytes(each) for place, each in enumerate(encoded) if place not in bad]}
        for suffix, spec in self._transform.facts.items():
            values = [each[suffix] for each in facts]
            made[name + suffix] = values if "*" in spec or not values else np.stack(values)
        return made, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexVideo(_Index):
    """Store films as they are, with the times of their frames, so that a clip reads only its bytes (`DecodeClip`).

    >>> IndexVideo(keep={"label": "int64"}).columns()["video_keyframes"]
    'int64[*]'
    """

    column: str = "video"

    @property
    def facts(self) -> Mapping[str, str]:
        """When each frame is shown, in ticks; the numbers of keyframes; height, width, and seconds of a tick."""
        return {"_pts": "int64[*]", "_keyframes": "int64[*]", "_format": "int64[4]"}

    def examine(self, encoded: memoryview) -> Mapping[str, NDArray[np.int64]]:
        """From the packets alone: nothing is decoded."""
        with _open(encoded, "video") as (container, stream):
            packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
            facts = [stream.height, stream.width, stream.time_base.numerator, stream.time_base.denominator]
        if not packets or any(packet.pts is None for packet in packets):
            raise BadValue("unsupported_video", "its frames have no times; put it into another container with ffmpeg")
        if not 0 < facts[0] * facts[1] <= _MAX_PIXELS:
            raise BadValue("too_many_pixels", f"{facts[1]} x {facts[0]}; {_MAX_PIXELS:,} pixels are allowed")
        pts = np.array(sorted({packet.pts for packet in packets}), np.int64)
        keyframes = np.searchsorted(pts, sorted({packet.pts for packet in packets if packet.is_keyframe}))
        return {"_pts": pts, "_keyframes": keyframes, "_format": np.array(facts, np.int64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexAudio(_Index):
    """Store sounds as they are, with their length and rate, from which `DecodeSound` draws.

    >>> IndexAudio(keep=()).columns()
    {'audio': 'bytes', 'audio_format': 'int64[3]'}
    """

    column: str = "audio"

    @property
    def facts(self) -> Mapping[str, str]:
        """Samples, samples per second, channels."""
        return {"_format": "int64[3]"}

    def examine(self, encoded: memoryview) -> Mapping[str, NDArray[np.int64]]:
        """From the packets alone: nothing is decoded."""
        with _open(encoded, "audio") as (container, stream):
            ticks = sum(packet.duration or 0 for packet in container.demux(stream) if not packet.is_discard)
            samples = round(ticks * stream.time_base * stream.rate)
            facts = [samples, stream.rate, stream.codec_context.channels]
        if not samples:
            raise BadValue("unsupported_audio", "it does not say how long it is")
        return {"_format": np.array(facts, np.int64)}


@dataclass(frozen=True)
class DecodeClip:
    """A map that turns a film into a clip: some of its frames, as an array.

    Raises:
        ValueError: the options do not go together; on a call, the film is damaged.

    >>> DecodeClip("video", num_frames=16, stride=2).choose(np.arange(100), 0.04, np.random.default_rng(7))[:3].tolist()
    [66, 68, 70]
    """

    column: str = "video"
    """Column with the film, which becomes the clip; `IndexVideo` made its companions, which are left out."""
    num_frames: int = field(default=16, kw_only=True)
    """Frames of a clip. A film that is too short stays at its last frame."""
    stride: int = field(default=1, kw_only=True)
    """How many frames on the next one is."""
    fps: float | None = field(default=None, kw_only=True)
    """In place of `stride`: frames per second, each the one that is shown at its time."""
    start: Start = field(default="random", kw_only=True)
    """Where the clip is: anywhere, drawn anew for each row of each epoch, in the "centre", or at the "first" frame."""
    size: int | tuple[int, int] | None = field(default=None, kw_only=True)
    """Height and width, or one number for both; None keeps those of the film."""
    mode: Literal["resize", "crop"] = field(default="resize", kw_only=True)
    """"resize" stretches to `size`; "crop" scales the short side and cuts out the centre."""
    layout: Literal["THWC", "TCHW"] = field(default="THWC", kw_only=True)
    """The order of dimensions: frames, height, width and colour channels."""

    def __post_init__(self) -> None:
        check_choice("start", self.start, get_args(Start))
        check_choice("mode", self.mode, ("resize", "crop"))
        check_choice("layout", self.layout, ("THWC", "TCHW"))
        for name, value in (("num_frames", self.num_frames), ("stride", self.stride)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r}; a whole number of at least 1 is needed.")
        if self.fps is not None and not (self.fps > 0 and self.stride == 1):
            raise ValueError(
                f"fps={self.fps!r} with stride={self.stride}; a number above 0 without a stride is needed."
            )
        if self.mode == "crop" and self.size is None:
            raise ValueError("mode='crop' needs a size.")

    @property
    def opened_columns(self) -> tuple[str, ...]:
        """The film: a plan gives it as a file."""
        return (self.column,)

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """The row with the clip, uint8, in place of the film, and the numbers of its frames in `<column>_frames`."""
        name = self.column
        pts, keyframes, facts = (_companion(row, name, each) for each in ("_pts", "_keyframes", "_format"))
        height, width, numerator, denominator = facts.tolist()
        chosen = self.choose(pts, numerator / denominator, rng)
        try:
            clip = self._decode(row[name], pts, keyframes, chosen, (height, width))
        except BadValue as error:
            raise ValueError(f"Column {name!r} has a film that cannot be decoded: {error}.") from None
        if self.layout == "TCHW":
            clip = np.ascontiguousarray(clip.transpose(0, 3, 1, 2))
        return {**row, name: clip, f"{name}_frames": chosen}

    def choose(self, pts: NDArray[np.int64], tick: float, rng: np.random.Generator) -> NDArray[np.int64]:
        """Which frames of a film to show, by when they come and the seconds of a tick."""
        if self.fps is None:
            span = (self.num_frames - 1) * self.stride
            first = int(self._begin(len(pts) - 1 - span, lambda latest: rng.integers(0, int(latest) + 1)))
            numbers = np.arange(first, first + span + 1, self.stride, dtype=np.int64)
            return np.minimum(numbers, len(pts) - 1, out=numbers)
        step = 1 / (self.fps * tick)
        latest = float(pts[-1] - pts[0]) - (self.num_frames - 1) * step
        begin = pts[0] + self._begin(latest, lambda latest: rng.uniform(0, latest))
        times = begin + step * np.arange(self.num_frames) + _ROUNDING
        shown: NDArray[np.int64] = np.searchsorted(pts, times, side="right") - 1
        return np.maximum(0, shown)

    def _begin(self, latest: float, draw: Any) -> float:
        if latest <= 0 or self.start == "first":
            return 0
        return float(draw(latest)) if self.start == "random" else latest / 2

    def _decode(
        self,
        film: Any,
        pts: NDArray[np.int64],
        keyframes: NDArray[np.int64],
        chosen: NDArray[np.int64],
        size: tuple[int, int],
    ) -> NDArray[np.uint8]:
        wanted = np.unique(chosen)
        for jumps in (keyframes, keyframes[:0]):
            with _open(film, "video") as (container, stream):
                found = _find_frames(container, stream, pts, jumps, wanted.tolist())
                frames = [self._shaped(frame, size) for frame in found]
            if len(frames) == len(wanted):
                clip = np.stack(frames)
                return clip if len(clip) == len(chosen) else clip[np.searchsorted(wanted, chosen)]
        raise BadValue("corrupt_video", f"frame {wanted[len(frames)]} is missing")

    def _shaped(self, frame: Any, stored: tuple[int, int]) -> NDArray[np.uint8]:
        """One frame as pixels, upright."""
        is_on_side = frame.rotation % 180 == 90
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size or stored
        if is_on_side and self.size is not None:
            height, width = width, height
        scale = max(height / stored[0], width / stored[1]) if self.mode == "crop" else 0
        high, wide = max(height, round(stored[0] * scale)), max(width, round(stored[1] * scale))
        pixels = frame.to_ndarray(format="rgb24", width=wide, height=high)
        top, left = (high - height) // 2, (wide - width) // 2
        return np.rot90(pixels[top : top + height, left : left + width], round(frame.rotation / 90))


def _find_frames(
    container: Any, stream: Any, pts: NDArray[np.int64], keyframes: NDArray[np.int64], wanted: list[int]
) -> Iterator[Any]:
    """The frames of these rising numbers, up to one that is not where it should be.

    Decoding goes on from the frame before, or from a keyframe after that; without keyframes, from the beginning.
    """
    frames, position = container.decode(stream), 0
    for number in wanted:
        place = int(np.searchsorted(keyframes, number, side="right")) - 1
        if place >= 0 and keyframes[place] > position:
            container.seek(int(pts[keyframes[place]]), stream=stream)
            frames = container.decode(stream)
        found = next((frame for frame in frames if frame.pts >= pts[number]), None)
        if found is None or found.pts != pts[number] or (found.is_corrupt and len(keyframes)):
            return
        position = number
        yield found


@dataclass(frozen=True)
class DecodeSound:
    """A map that turns a sound into float32 samples: [samples], or [channels, samples] for more than one channel."""

    column: str = "audio"
    """Column with the sound, which becomes the samples; `IndexAudio` made its companion, which is left out."""
    seconds: float | None = field(default=None, kw_only=True)
    """How much of it; a shorter one ends in silence. None takes all of it."""
    rate: int | None = field(default=None, kw_only=True)
    """Samples per second to convert to; None keeps the rate."""
    channels: Literal[1, 2] = field(default=1, kw_only=True)
    """1 mixes all channels."""
    start: Start = field(default="random", kw_only=True)
    """As for `DecodeClip`."""

    def __post_init__(self) -> None:
        check_choice("start", self.start, get_args(Start))
        check_choice("channels", self.channels, (1, 2))
        for name, value in (("seconds", self.seconds), ("rate", self.rate)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}; a number above 0 is needed.")

    @property
    def opened_columns(self) -> tuple[str, ...]:
        """The sound: a plan gives it as a file."""
        return (self.column,)

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """The row with the samples in place of the sound, and how many of them are sound in `<column>_samples`."""
        name = self.column
        total, stored, _ = _companion(row, name, "_format").tolist()
        rate = self.rate or stored
        size = total if self.seconds is None else min(total, round(self.seconds * stored))
        latest = total - size
        first = {"random": int(rng.integers(0, latest + 1)), "centre": latest // 2, "first": 0}[self.start]
        try:
            sound = self._decode(row[name], stored, rate, first, first + size)
        except BadValue as error:
            raise ValueError(f"Column {name!r} has a sound that cannot be decoded: {error}.") from None
        length = round((size / stored if self.seconds is None else self.seconds) * rate)
        samples = np.zeros((self.channels, length), np.float32)
        num_heard = min(length, sound.shape[1])
        samples[:, :num_heard] = sound[:, :num_heard]
        heard = {f"{name}_samples": np.int64(num_heard)}
        return {**row, name: samples[0] if self.channels == 1 else samples, **heard}

    def _decode(self, encoded: Any, stored: int, rate: int, begin: int, end: int) -> NDArray[np.float32]:
        """Samples `begin` to `end` of the sound, converted."""
        av = _import_av()
        pieces = []
        convert = av.AudioResampler(format="fltp", layout=None if self.channels == 1 else "stereo", rate=rate)
        with _open(encoded, "audio") as (container, stream):
            origin = stream.start_time or 0
            if begin:
                seconds = max(Fraction(0), Fraction(begin, stored) - Fraction(_PREROLL_SECONDS))
                container.seek(origin + int(seconds / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                at = round((frame.pts - origin) * frame.time_base * stored)
                if at >= end:
                    break
                first, last = max(0, begin - at), min(frame.samples, end - at)
                if first < last:
                    pieces += [each.to_ndarray() for each in convert.resample(_cut(av, frame, first, last))]
            pieces += [each.to_ndarray() for each in convert.resample(None)]
        sound: NDArray[np.float32] = np.concatenate(pieces or [np.empty((self.channels, 0), np.float32)], axis=1)
        return sound.mean(axis=0, keepdims=True) if self.channels == 1 else sound


def _cut(av: Any, frame: Any, first: int, last: int) -> Any:
    """Samples `first` to `last` of a frame, as a frame without a time."""
    if first or last < frame.samples:
        step = 1 if frame.format.is_planar else len(frame.layout.channels)
        array = np.ascontiguousarray(frame.to_ndarray()[:, first * step : last * step])
        part = av.AudioFrame.from_ndarray(array, format=frame.format.name, layout=frame.layout.name)
        part.sample_rate, part.time_base = frame.sample_rate, frame.time_base
        frame = part
    frame.pts = None
    return frame


def _companion(row: Row, name: str, suffix: str) -> NDArray[np.int64]:
    """A column that the index made, taken out of the row."""
    if name + suffix not in row:
        kind = "IndexAudio" if suffix == "_format" and f"{name}_pts" not in row else "IndexVideo"
        raise SchemaError(
            f"There is no column {name + suffix!r} beside {name!r}. Prepare the data with transform=penstock.{kind}"
            f"(column={name!r}), and show all of its columns."
        )
    found: NDArray[np.int64] = row.pop(name + suffix)
    return found
