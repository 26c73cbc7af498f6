"""How much of Pillow's own speed is left inside the transform `DecodeImage`?

    python benchmarks/bench_images.py              about 30 seconds on one core

1,280 JPEGs of 500x375 (quality 90, made of gradients, edges and noise so that they weigh about what photographs do) to
224x224x3 uint8, in one process. "bare" is the shortest loop that does it with the same decoder: open, convert,
resize, as an array. They take turns, batch by batch; figures are the sum over all batches.
Large photographs (3000x2250) show what draft decoding gains.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _machine import print_result
from numpy.typing import NDArray
from PIL import Image

from penstock.preparation import DecodeImage
from penstock.sources import Records

SIZE = 224
NUM_IMAGES = 1280
NUM_DIFFERENT = 64
NUM_LARGE = 12
BATCH = 64
QUALITY = 90


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


def main() -> None:
    small, large = make_jpegs(NUM_DIFFERENT, 500, 375), make_jpegs(NUM_LARGE, 3000, 2250)
    opened, crop = DecodeImage(size=SIZE, keep=()).open(), DecodeImage(size=SIZE, mode="crop", keep=()).open()
    plain = DecodeImage(size=SIZE, draft=False, keep=()).open()
    for warm in (opened, crop, plain):
        warm(Records({"image": small[:4]}, 0, 4))
    figures: dict[str, Any] = {}
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
        "processes": 1,
        "filter": "bilinear",
    }
    print_result("How much of Pillow's speed is left inside DecodeImage?", settings, figures, "pillow")


if __name__ == "__main__":
    main()
