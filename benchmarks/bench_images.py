"""How much of Pillow's own speed is left in preparing images, and inside the transform `DecodeImage`?

    python benchmarks/bench_images.py              about a minute on two cores

1,280 JPEGs of 500x375 (quality 90, made of gradients, edges and noise so that they weigh about what photographs do) to
224x224x3 uint8. "bare" is the shortest loop that does it with the same decoder: open, convert, resize, as an array.
First a folder of classes with `penstock.prepare` on all cores, from file to shard, against the bare loop on all cores
with the files in memory, which keeps nothing; they take turns, and start-up is told apart. Then the transform in this
process, in turns batch by batch. Large photographs (3000x2250) show what draft decoding gains.
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from _machine import print_result
from numpy.typing import NDArray
from PIL import Image

from penstock.preparation import prepare
from penstock.sources import Records
from penstock.transforms import DecodeImage

SIZE = 224
NUM_IMAGES = 1280
NUM_DIFFERENT = 64
NUM_LARGE = 12
BATCH = 64
QUALITY = 90
NUM_CLASSES = 4
ROUNDS = 3
WORKERS = len(os.sched_getaffinity(0))
START_SECONDS = 4.0


def make_photo(width: int, height: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    yy, xx = np.mgrid[0:height, 0:width]
    waves = sum(np.sin(xx / rng.uniform(8, 90) + rng.uniform(0, 6)) * np.cos(yy / rng.uniform(8, 90)) for _ in range(5))
    photo = 128 + 25 * np.asarray(waves)[..., None] * rng.uniform(0.5, 1.5, 3)
    for _ in range(20):
        top, left = rng.integers(0, height), rng.integers(0, width)
        photo[top : top + 60, left : left + 60] += rng.uniform(-60, 60, 3)
    return np.clip(photo + rng.normal(0, 6, photo.shape), 0, 255).astype(np.uint8)


def make_jpegs(number: int, width: int, height: int) -> list[bytes]:
    rng = np.random.default_rng(7)
    encoded = []
    for _ in range(number):
        file = io.BytesIO()
        Image.fromarray(make_photo(width, height, rng)).save(file, "JPEG", quality=QUALITY)
        encoded.append(file.getvalue())
    return encoded


def decode_bare(encoded: list[bytes]) -> list[NDArray[np.uint8]]:
    images = []
    for data in encoded:
        image = Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        images.append(np.asarray(image))
    return images


def batches(encoded: list[bytes], number: int) -> Iterator[list[bytes]]:
    repeated = [encoded[place % len(encoded)] for place in range(number)]
    return (repeated[begin : begin + BATCH] for begin in range(0, number, BATCH))


def seconds_of(work: Callable[[], object]) -> NDArray[np.float64]:
    """Seconds by the clock, and of this process's own time: the second says more on a machine that is shared."""
    started = np.array([time.perf_counter(), time.process_time()])
    work()
    return np.array([time.perf_counter(), time.process_time()]) - started


def compare(opened: Any, encoded: list[bytes], number: int) -> dict[str, float]:
    spent = {"bare": np.zeros(2), "transform": np.zeros(2)}
    for turn, batch in enumerate(batches(encoded, number)):
        records = Records({"image": batch}, 0, len(batch))
        work: dict[str, Callable[[], object]] = {
            "bare": lambda batch=batch: decode_bare(batch),
            "transform": lambda records=records: opened(records),
        }
        for name in list(work)[:: 1 if turn % 2 else -1]:
            spent[name] += seconds_of(work[name])
    return {
        "transform images/s": float(number / spent["transform"][0]),
        "bare images/s": float(number / spent["bare"][0]),
        "share of bare, by the clock": float(spent["bare"][0] / spent["transform"][0]),
        "share of bare, by processor time": float(spent["bare"][1] / spent["transform"][1]),
    }


def write_folder(folder: Path, encoded: list[bytes]) -> None:
    for number in range(NUM_IMAGES):
        path = folder / f"class-{number % NUM_CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded[number % len(encoded)])


def decode_share(encoded: list[bytes], number: int, begin_at: float) -> tuple[float, float, float]:
    """When the bare loop began and ended with a share of the images, and its processor time."""
    decode_bare(encoded[:4])
    shares = list(batches(encoded, number))
    time.sleep(max(0.0, begin_at - time.time()))
    begin, processor = time.time(), time.process_time()
    for batch in shares:
        decode_bare(batch)
    return begin, time.time(), time.process_time() - processor


def time_bare(encoded: list[bytes]) -> tuple[float, float]:
    """Seconds by the clock, and processor time, of the bare loop on all cores."""
    begin_at = time.time() + START_SECONDS
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(decode_share, encoded, NUM_IMAGES // WORKERS, begin_at) for _ in range(WORKERS)]
        spans = [run.result() for run in runs]
    seconds = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    return seconds, sum(processor for _, _, processor in spans)


def measure_folder(encoded: list[bytes]) -> dict[str, float]:
    """`prepare` of an image folder against the bare loop, both on all cores, in turns."""
    bare, prepared = [], []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        (Path(name) / "images").mkdir()
        write_folder(Path(name) / "images", encoded)
        for number in range(ROUNDS):
            bare.append(time_bare(encoded))
            transform, destination = DecodeImage(size=SIZE), Path(name) / f"data-{number}"
            prepared.append(prepare(Path(name) / "images", destination, transform=transform, workers=WORKERS))
    seconds = statistics.median(run.seconds["work"] + run.seconds["commit"] for run in prepared)
    processor = statistics.median(sum(run.processor_seconds.values()) for run in prepared)
    median = prepared[ROUNDS // 2]
    return {
        "prepare, images/s": NUM_IMAGES / seconds,
        "bare, images/s": NUM_IMAGES / statistics.median(clock for clock, _ in bare),
        "share of bare, by the clock": statistics.median(clock for clock, _ in bare) / seconds,
        "share of bare, by processor time": statistics.median(spent for _, spent in bare) / processor,
        "start-up of prepare, s": statistics.median(run.seconds["start_up"] for run in prepared),
        **{f"workers: {stage}, processor s": spent for stage, spent in median.processor_seconds.items()},
    }


def main() -> None:
    small, large = make_jpegs(NUM_DIFFERENT, 500, 375), make_jpegs(NUM_LARGE, 3000, 2250)
    opened, crop = DecodeImage(size=SIZE, keep=()).open(), DecodeImage(size=SIZE, mode="crop", keep=()).open()
    plain = DecodeImage(size=SIZE, draft=False, keep=()).open()
    for warm in (opened, crop, plain):
        warm(Records({"image": small[:4]}, 0, 4))
    figures: dict[str, Any] = {f"folder, all cores: {key}": value for key, value in measure_folder(small).items()}
    for name, transform, encoded, number in (
        ("500x375, resize", opened, small, NUM_IMAGES),
        ("500x375, crop", crop, small, NUM_IMAGES // 4),
        ("3000x2250, resize", opened, large, NUM_LARGE * 2),
        ("3000x2250, no draft", plain, large, NUM_LARGE * 2),
    ):
        figures |= {f"{name}: {key}": value for key, value in compare(transform, encoded, number).items()}
    settings = {
        "images": NUM_IMAGES,
        "mean_bytes": sum(map(len, small)) // len(small),
        "size": SIZE,
        "workers": WORKERS,
        "filter": "bilinear",
    }
    print_result("How much of Pillow's speed is left in preparing images?", settings, figures, "pillow")


if __name__ == "__main__":
    main()
