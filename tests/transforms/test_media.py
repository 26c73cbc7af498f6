"""Films and sounds: clips are what decoding all of a film gives, and read only their part of it."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import wave
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

import penstock
from penstock.errors import CorruptionError, SchemaError
from penstock.transforms import Output

from .tokenizer_examples import make_records, reasons

HEIGHT, WIDTH, RATE = 48, 64, 16_000
Pixels = NDArray[np.uint8]


def make_film(
    container: str = "mp4",
    codec: str = "libx264",
    num_frames: int = 90,
    *,
    times: list[int] | None = None,
    options: dict[str, str] | None = None,
    gop: int = 12,
) -> bytes:
    """A film in which every frame differs from all others; `times` are in 90ths of a second."""
    file, rng = io.BytesIO(), np.random.default_rng(3)
    with av.open(file, "w", format={"mkv": "matroska"}.get(container, container)) as out:
        stream = out.add_stream(codec, rate=30, options=options or {})
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 90)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", gop
        scene = rng.integers(0, 255, (HEIGHT, WIDTH, 3))
        for number in range(num_frames):
            pixels = np.roll(scene, number, axis=1)
            pixels[:8, : number % WIDTH] = 255
            frame = av.VideoFrame.from_ndarray(pixels.astype(np.uint8), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 90)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


def all_frames(film: bytes) -> list[Pixels]:
    """The film decoded from its first frame to its last."""
    with av.open(io.BytesIO(film)) as container:
        return [np.asarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def make_sound(codec: str = "flac", container: str = "flac", seconds: float = 4, layout: str = "mono") -> bytes:
    time = np.arange(int(seconds * RATE)) / RATE
    waves = np.sin(2 * np.pi * (300 + 100 * time) * time)
    file, count = io.BytesIO(), {"mono": 1, "stereo": 2}[layout]
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=RATE, layout=layout)
        samples = np.stack([waves * (0.8 - 0.4 * channel) for channel in range(count)]).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate = RATE
        cut = av.AudioResampler(format=stream.codec_context.format, frame_size=1024)
        for part in [*cut.resample(frame), *cut.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def make_wave(samples: NDArray[np.int16]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(samples.tobytes())
    return file.getvalue()


def index(values: list[bytes], column: str = "video") -> Output:
    kind = penstock.IndexVideo if column == "video" else penstock.IndexAudio
    return kind(keep=()).open()(make_records({column: values}))


def row_of(value: bytes, column: str = "video") -> dict[str, Any]:
    """A row as a plan gives it."""
    made = index([value], column)
    assert not made.errors, made.errors
    return {name: values[0] for name, values in made.columns.items()}


def clip_of(film: bytes, seed: int = 0, **options: Any) -> dict[str, Any]:
    return penstock.DecodeClip(**options)(row_of(film), np.random.default_rng(seed))


FILMS = {
    "H.264 with B-frames in MP4": ("mp4", "libx264", {"bf": "3"}),
    "H.264 with open groups": ("mp4", "libx264", {"x264-params": "open-gop=1:bframes=3"}),
    "H.264 in Matroska": ("mkv", "libx264", {}),
    "VP9 in WebM": ("webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    "MPEG-4 in MOV": ("mov", "mpeg4", {}),
    "H.264 in a transport stream": ("mpegts", "libx264", {"bf": "2"}),
}


@pytest.fixture(scope="module", params=FILMS)
def film(request: pytest.FixtureRequest) -> bytes:
    container, codec, options = FILMS[request.param]
    return make_film(container, codec, options=options)


@pytest.mark.parametrize(
    "options", [{"num_frames": 4}, {"num_frames": 8, "stride": 3}, {"num_frames": 3, "stride": 40}]
)
def test_a_clip_is_what_decoding_the_whole_film_gives(film: bytes, options: dict[str, int]) -> None:
    frames = all_frames(film)
    for seed in range(6):
        clip = clip_of(film, seed, **options)
        numbers = clip["video_frames"]
        assert np.diff(numbers).tolist() == [options.get("stride", 1)] * (len(numbers) - 1)
        assert np.array_equal(clip["video"], np.stack([frames[number] for number in numbers]))


def test_random_clips_reach_both_ends_and_the_others_are_where_they_say() -> None:
    film = make_film(num_frames=20)
    drawn = {int(clip_of(film, seed, num_frames=4, stride=2)["video_frames"][0]) for seed in range(120)}
    assert drawn == set(range(14))
    assert clip_of(film, num_frames=4, stride=2, start="first")["video_frames"].tolist() == [0, 2, 4, 6]
    assert clip_of(film, num_frames=4, stride=2, start="centre")["video_frames"].tolist() == [6, 8, 10, 12]


def test_a_short_film_stays_at_its_last_frame() -> None:
    film = make_film(num_frames=3)
    clip = clip_of(film, num_frames=6)
    assert clip["video_frames"].tolist() == [0, 1, 2, 2, 2, 2]
    assert np.array_equal(clip["video"][5], all_frames(film)[2])


def test_frames_per_second_count_by_time_where_frames_come_unevenly() -> None:
    times = [0, 1, 2, 30, 31, 60, 90, 120, 121, 122, 150]  # in 90ths of a second
    film = make_film("matroska", num_frames=len(times), times=times)
    clip = clip_of(film, num_frames=4, fps=3, start="first")  # at 0, 30, 60 and 90
    assert clip["video_frames"].tolist() == [0, 3, 5, 6]
    frames = all_frames(film)
    assert np.array_equal(clip["video"], np.stack([frames[number] for number in (0, 3, 5, 6)]))


def test_frames_are_scaled_cut_and_ordered_as_the_options_say() -> None:
    film = make_film(num_frames=4)
    whole = clip_of(film, num_frames=2, start="first")["video"]
    assert whole.shape == (2, HEIGHT, WIDTH, 3)
    assert whole.dtype == np.uint8
    assert clip_of(film, num_frames=2, size=32)["video"].shape == (2, 32, 32, 3)
    cut = clip_of(film, num_frames=2, start="first", size=HEIGHT, mode="crop")["video"]
    assert np.array_equal(cut, whole[:, :, 8:56])
    channels_first = clip_of(film, num_frames=2, start="first", layout="TCHW")["video"]
    assert np.array_equal(channels_first, whole.transpose(0, 3, 1, 2))


class Reads:
    """How much of each film a clip reads."""

    opened_columns = ("video",)

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        clip = penstock.DecodeClip(num_frames=4)(dict(row), rng)
        return {"read": row["video"].num_read, "size": row["video"].size, "first": clip["video_frames"][0]}


@pytest.fixture(scope="module")
def long_film() -> bytes:
    return make_film(num_frames=2_400, gop=24, options={"crf": "4", "preset": "ultrafast"})


@pytest.fixture
def films(tmp_path: Path, long_film: bytes, inline: None) -> Path:
    (tmp_path / "raw").mkdir()
    for number in range(2):
        (tmp_path / "raw" / f"{number}.mp4").write_bytes(long_film)
    penstock.prepare(tmp_path / "raw", tmp_path / "data", transform=penstock.IndexVideo())
    return tmp_path / "data"


@pytest.mark.parametrize("reading", [{}, {"io": "pread"}])
def test_a_clip_reads_only_its_part_of_a_film(films: Path, long_film: bytes, reading: dict[str, Any]) -> None:
    assert len(long_film) > 4 << 20
    plan = penstock.open(films, **reading).shuffle(seed=7).map(Reads()).batch(2)
    for epoch in range(4):
        batch = plan.read(0, epoch=epoch)
        assert (batch["size"] == len(long_film)).all()
        assert batch["read"].max() < 0.07 * len(long_film)


def test_damage_is_found_by_the_clips_that_need_the_bytes_and_no_others(films: Path, long_film: bytes) -> None:
    [shard] = films.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    at = content.index(long_film[-4096:]) - (600 << 10)  # near the end of the first film
    content[at] ^= 1
    shard.write_bytes(content)
    plan = penstock.open(films).map(penstock.DecodeClip(num_frames=4, start="first")).batch(1)
    assert plan.read(0)["video"].shape == (1, 4, HEIGHT, WIDTH, 3)
    spread = penstock.DecodeClip(num_frames=100, stride=24, start="first")
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        penstock.open(films).map(spread).batch(1).read(0)


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_clips_are_the_same_in_workers_and_after_a_resume(films: Path, workers: str) -> None:
    plan = penstock.open(films).shuffle(seed=7).map(penstock.DecodeClip(num_frames=2, size=16)).batch(2)
    expected = [plan.read(0, epoch=epoch) for epoch in range(4)]
    assert not np.array_equal(expected[0]["video_frames"], expected[1]["video_frames"])  # drawn anew in each epoch
    with penstock.DataLoader(plan, workers=workers, num_workers=1, epochs=None) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(2)]
        state = loader.state_dict()
    with penstock.DataLoader(plan, workers=workers, num_workers=1, epochs=None) as loader:
        loader.load_state_dict(state)
        rest = [batch for _, batch in zip(range(2), loader, strict=False)]
    for batch, wanted in zip([*first, *rest], expected, strict=True):
        for name in ("video", "video_frames"):
            assert np.array_equal(batch[name].numpy(), wanted[name])


def test_a_films_settings_and_the_draw_are_part_of_the_plan(films: Path) -> None:
    data = penstock.open(films)
    plans = [data.map(penstock.DecodeClip(num_frames=number)).batch(1) for number in (2, 2, 3)]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint


def test_a_film_that_was_not_indexed_is_refused_by_name() -> None:
    data = penstock.from_arrays({"video": [make_film(num_frames=2)]})
    with pytest.raises(SchemaError, match=r"no column 'video_pts'.*transform=penstock.IndexVideo\(column='video'\)"):
        data.map(penstock.DecodeClip()).batch(1).read(0)


BAD_FILMS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "corrupt_video"),
    "text": (b"not a film" * 100, "corrupt_video"),
    "half of a film": (make_film()[:3000], "corrupt_video"),
    "a sound": (make_sound("aac", "mp4", 0.5), "no_video"),
    "a playlist": (
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "corrupt_video",
    ),
    "a list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", "corrupt_video"),
}


@pytest.mark.parametrize("name", BAD_FILMS)
def test_a_film_that_cannot_be_used_is_a_bad_row_with_a_reason(name: str) -> None:
    content, reason = BAD_FILMS[name]
    made = index([make_film(num_frames=2), content, make_film(num_frames=3)])
    assert reasons(made) == [(1, reason)]
    assert [len(pts) for pts in made.columns["video_pts"]] == [2, 3]
    assert made.sources.tolist() == [0, 2]


def test_a_playlist_opens_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "part.ts").write_bytes(make_film("mpegts"))
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\n{tmp_path}/part.ts\n#EXT-X-ENDLIST\n".encode()
    with av.open(io.BytesIO(playlist), format="hls") as container:
        assert container.streams.video  # without the list of formats, it would be opened
    assert reasons(index([playlist])) == [(0, "corrupt_video")]


def test_damage_behind_the_header_fails_in_training_and_the_row_can_be_replaced(tmp_path: Path, inline: None) -> None:
    film = make_film(gop=90)
    cut = film.replace(film[2000:9000], bytes(7000))
    values = [film, cut, film]
    made = index(values)
    assert not made.errors
    data = penstock.from_arrays(dict(made.columns))
    broken = data.map(penstock.DecodeClip(num_frames=80, start="first"), on_error="skip").batch(3).read(0)
    whole = np.stack(all_frames(film)[:80])
    assert np.array_equal(broken["video"][0], whole)
    assert broken["is_replaced"].tolist() in ([False, True, False], [False, False, False])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 0}, "num_frames=0; a whole number"),
        ({"stride": 1.5}, "stride=1.5; a whole number"),
        ({"fps": 0}, "fps=0"),
        ({"fps": 2, "stride": 2}, "without a stride"),
        ({"start": "middle"}, "start='middle'"),
        ({"mode": "crop"}, "needs a size"),
        ({"layout": "HWC"}, "layout='HWC'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        penstock.DecodeClip(**options)


def sound_of(sound: bytes, seed: int = 0, **options: Any) -> dict[str, Any]:
    return penstock.DecodeSound(**options)(row_of(sound, "audio"), np.random.default_rng(seed))


def test_a_wave_file_comes_back_to_the_bit_whole_or_in_part() -> None:
    samples = np.random.default_rng(5).integers(-30_000, 30_000, 2 * RATE).astype(np.int16)
    sound = make_wave(samples)
    assert index([sound], "audio").columns["audio_format"].tolist() == [[2 * RATE, RATE, 1]]
    expected = samples.astype(np.float32) / 32_768
    assert np.array_equal(sound_of(sound)["audio"], expected)
    for seed in range(5):
        part = sound_of(sound, seed, seconds=0.3)["audio"]
        [place] = [at for at in np.flatnonzero(expected == part[0]) if np.array_equal(expected[at : at + 4800], part)]
        assert 0 <= place <= len(expected) - 4800


@pytest.mark.parametrize(
    ("codec", "container"), [("flac", "flac"), ("libmp3lame", "mp3"), ("aac", "mp4"), ("libopus", "ogg")]
)
def test_part_of_a_sound_is_that_part_of_the_whole(codec: str, container: str) -> None:
    sound = make_sound(codec, container)
    whole = sound_of(sound)["audio"]
    part = sound_of(sound, seconds=0.25, start="centre")["audio"]
    total, stored, _ = row_of(sound, "audio")["audio_format"].tolist()
    begin, size = (total - len(part)) // 2, round(0.25 * stored)
    assert len(part) == size
    assert np.abs(part - whole[begin : begin + size]).max() < 1e-3


def test_sounds_are_converted_mixed_and_filled_up_with_silence() -> None:
    sound = make_sound(layout="stereo", seconds=1)
    both = sound_of(sound, channels=2)["audio"]
    assert both.shape == (2, RATE)
    mixed = sound_of(sound, channels=1)["audio"]
    assert np.allclose(mixed, both.mean(axis=0), atol=1e-3)
    slow = sound_of(sound, rate=8_000, seconds=2)
    assert slow["audio"].shape == (RATE,)
    assert abs(int(slow["audio_samples"]) - 8_000) <= 32
    assert not slow["audio"][8_000:].any()
    assert slow["audio"][:7_900].std() > 0.3


def test_sounds_are_drawn_from_a_prepared_folder(tmp_path: Path, inline: None) -> None:
    (tmp_path / "raw").mkdir()
    for number in range(4):
        (tmp_path / "raw" / f"{number}.flac").write_bytes(make_sound(seconds=1 + number))
    (tmp_path / "raw" / "broken.flac").write_bytes(make_sound()[:40])
    prepared = penstock.prepare(tmp_path / "raw", tmp_path / "data", transform=penstock.IndexAudio(), on_error="skip")
    assert prepared.skipped == {"corrupt_audio": 1}
    plan = penstock.open(tmp_path / "data").shuffle(seed=1).map(penstock.DecodeSound(seconds=0.5)).batch(4)
    batch = plan.read(0)
    assert batch["audio"].shape == (4, RATE // 2)
    assert (batch["audio_samples"] == RATE // 2).all()


@pytest.fixture
def ffmpeg_film(tmp_path: Path) -> Path:
    """A film with sound, made by Debian's ffmpeg."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed; `make ffmpeg` installs it on Debian and Ubuntu, as root.")
    path = tmp_path / "film.mp4"
    made = "-f lavfi -i testsrc2=size=320x180:rate=25 -f lavfi -i sine=frequency=440:sample_rate=16000 -t 8"
    coded = "-c:v libx264 -g 50 -bf 2 -pix_fmt yuv420p -c:a aac"
    subprocess.run(
        ["ffmpeg", "-v", "error", *made.split(), *coded.split(), str(path)], check=True, stdin=subprocess.DEVNULL
    )
    return path


def test_clips_equal_those_of_torchcodec(ffmpeg_film: Path) -> None:
    decoders = pytest.importorskip("torchcodec.decoders", exc_type=(ImportError, RuntimeError))
    film = ffmpeg_film.read_bytes()
    theirs = decoders.VideoDecoder(film, dimension_order="NHWC")
    for seed in range(5):
        clip = clip_of(film, seed, num_frames=8, stride=3)
        frames = theirs.get_frames_at(clip["video_frames"].tolist()).data.numpy()
        assert np.array_equal(clip["video"], frames)


def test_a_film_that_lies_on_its_side_comes_upright(ffmpeg_film: Path, tmp_path: Path) -> None:
    turned = tmp_path / "turned.mp4"
    command = ["ffmpeg", "-v", "error", "-i", str(ffmpeg_film), "-c", "copy", "-metadata:s:v", "rotate=90", str(turned)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    upright = clip_of(turned.read_bytes(), num_frames=1, start="first")["video"][0]
    stored = clip_of(ffmpeg_film.read_bytes(), num_frames=1, start="first")["video"][0]
    assert np.array_equal(upright, np.rot90(stored))  # as ffmpeg and torchcodec turn it


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before + 8
