"""What does a clip cost, in time and in bytes, from the middle of a film?

    python benchmarks/bench_media.py              about a minute on two cores

A film of two minutes at 640x360 (30 frames a second, a keyframe every two seconds; made here), from which clips of 16
frames with stride 2 are drawn at random, in turns by

    penstock        DecodeClip on the stored film: reads what the clip needs
    from the start  PyAV, decoding from the first frame on until the clip is complete
    torchcodec      VideoDecoder on the film's bytes, which looks through all of it first; where it can be imported

All three give the same pixels, which is checked. One thread each.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
from _machine import print_result

import penstock

SECONDS, RATE, HEIGHT, WIDTH, GROUP = 120, 30, 360, 640, 60
CLIP = {"num_frames": 16, "stride": 2}
ROUNDS = 12


def make_film() -> bytes:
    file, rng = io.BytesIO(), np.random.default_rng(7)
    scene = np.kron(rng.integers(0, 255, (HEIGHT // 8, WIDTH // 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=RATE, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", GROUP
        for number in range(SECONDS * RATE):
            pixels = np.roll(scene, (number // 3, 2 * number), axis=(0, 1))
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        out.mux(stream.encode(None))
    return file.getvalue()


class Measured:
    """`DecodeClip`, and how much of the film it read."""

    opened_columns = ("video",)

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The clip, beside what it took."""
        clip = penstock.DecodeClip("video", **CLIP)(row, rng)
        return {**clip, "read": row["video"].num_read}


def decode_from_start(film: bytes, numbers: list[int]) -> Any:
    with av.open(io.BytesIO(film)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        wanted, found = set(numbers), []
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                found.append(frame.to_ndarray(format="rgb24"))
            if number == numbers[-1]:
                break
    return np.stack(found)


def others(film: bytes) -> dict[str, Callable[[list[int]], Any]]:
    known: dict[str, Callable[[list[int]], Any]] = {"from the start": lambda numbers: decode_from_start(film, numbers)}
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, RuntimeError) as error:
        print(f"without torchcodec: {str(error).splitlines()[0]}")
        return known

    def read(numbers: list[int]) -> Any:
        return VideoDecoder(film, dimension_order="NHWC").get_frames_at(numbers).data.numpy()

    return known | {"torchcodec": read}


def main() -> None:
    film = make_film()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        (Path(name) / "films").mkdir()
        (Path(name) / "films" / "film.mp4").write_bytes(film)
        penstock.prepare(Path(name) / "films", Path(name) / "data", transform=penstock.IndexVideo(), workers=1)
        plan = penstock.open(Path(name) / "data").shuffle(seed=7).map(Measured()).batch(1)
        spent: dict[str, list[float]] = {"penstock": []}
        read = []
        for epoch in range(ROUNDS):
            begin = time.perf_counter()
            batch = plan.read(0, epoch=epoch)
            spent["penstock"].append(time.perf_counter() - begin)
            read.append(int(batch["read"][0]))
            for kind, decode in others(film).items():
                begin = time.perf_counter()
                clip = decode(batch["video_frames"][0].tolist())
                spent.setdefault(kind, []).append(time.perf_counter() - begin)
                assert np.array_equal(clip, batch["video"][0]), kind
    figures: dict[str, Any] = {f"{kind}, s per clip": statistics.median(times) for kind, times in spent.items()}
    figures["penstock, share of the film's bytes that a clip reads"] = statistics.mean(read) / len(film)
    settings = {
        "film_bytes": len(film),
        "seconds": SECONDS,
        "size": f"{WIDTH}x{HEIGHT}",
        "keyframe_every": GROUP,
        **CLIP,
    }
    print_result("What does a clip from the middle of a film cost?", settings, figures, "av")


if __name__ == "__main__":
    main()
