"""JPEGs to batches: photographs of 500 x 375, decoded and resized to 224 x 224, 32 of them with labels.

From a folder of classes, from tars, and from each library's own format, with Pillow and with OpenCV: who decodes faster
is faster, so both are tried wherever a function decodes.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _material
import numpy as np
from _turns import ENVIRONMENTS, Peer, Question, Turn, endless, rate, run

SIZE, BATCH, NUMBER, SHARDS, CLASSES = 224, 32, 4096, 8, 8


def prepare(folder: Path) -> None:
    import webdataset

    encoded = _material.photos(512)
    for shard in range(SHARDS):
        (folder / "images" / f"class-{shard}").mkdir(parents=True)
        with webdataset.TarWriter(str(folder / f"images-{shard:03}.tar")) as tar:
            for place in range(shard, NUMBER, SHARDS):
                data = encoded[place % len(encoded)]
                (folder / "images" / f"class-{shard}" / f"{place:06}.jpg").write_bytes(data)
                tar.write({"__key__": f"{place:06}", "jpg": data, "cls": shard})


def with_pillow(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def with_opencv(data: bytes) -> np.ndarray:
    import cv2

    cv2.setNumThreads(1)
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    return cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_AREA)


DECODERS: dict[str, Callable[[bytes], np.ndarray]] = {"Pillow": with_pillow, "OpenCV": with_opencv}


def pillow_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": with_pillow(row["jpg"]), "label": int(row["cls"])}


def opencv_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": with_opencv(row["jpg"]), "label": int(row["cls"])}


ROWS = {"Pillow": pillow_row, "OpenCV": opencv_row}


def turn(batches: Iterator[Any], source: str) -> Turn:
    """Images a second; each batch is checked and touched."""

    def count(batch: Any) -> float:
        images, labels = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
        assert tuple(images.shape) == (BATCH, SIZE, SIZE, 3)
        assert str(images.dtype) == "torch.uint8"
        return BATCH + 0 * int(images[0, 0, 0, 0]) * int(labels[0])

    return lambda: {source: rate(batches, count, 1.2)}


def options_of(arm: str) -> tuple[str, str, int]:
    """Source, decoder and workers of a setting's name."""
    source, decoder, workers = arm.split(", ")
    return source, decoder, int(workers.split()[0])


def decode_all(pairs: tuple[str, list[bytes]]) -> int:
    return len([DECODERS[pairs[0]](data) for data in pairs[1]])


def bare(folder: Path, arm: str) -> Turn:
    """Decode and resize on both cores, and keep nothing."""
    files = [path.read_bytes() for path in sorted((folder / "images").rglob("*.jpg"))[:1024]]
    pool = multiprocessing.get_context("spawn").Pool(2)
    shares = [(arm, files[start::8]) for start in range(8)]

    def measure() -> dict[str, float]:
        count = rate(endless(lambda: pool.imap_unordered(decode_all, shares)), float, 1.2, 4)
        return dict.fromkeys(QUESTION.measures, count)

    return measure


class Folder:
    """What ImageFolder does: a list of paths, opened one by one."""

    def __init__(self, folder: Path, decoder: str) -> None:
        self.paths, self.decoder = sorted((folder / "images").rglob("*.jpg")), decoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path = self.paths[index]
        return DECODERS[self.decoder](path.read_bytes()), int(path.parent.name[-1])


def torch(folder: Path, arm: str) -> Turn:
    from torch.utils.data import DataLoader

    source, decoder, workers = options_of(arm)
    options = {"shuffle": True, "num_workers": workers, "persistent_workers": workers > 0, "drop_last": True}
    loader = DataLoader(Folder(folder, decoder), BATCH, **options)
    return turn(endless(lambda: loader), source)


def torchvision(folder: Path, arm: str) -> Turn:
    import sys

    sys.path.append(str(ENVIRONMENTS / "torchvision"))
    from torchvision.transforms import v2  # noqa: F401

    raise RuntimeError("it imports here: give it a setting")


def penstock(folder: Path, arm: str) -> Turn:
    import penstock

    source, decoder, workers = options_of(arm)
    kind = "process" if "process" in arm else "thread"
    if source == "a folder":
        loader = penstock.DataLoader(
            Folder(folder, decoder), BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True
        )
        return turn(endless(lambda: loader), source)
    tars = penstock.open(folder / "images-{000..007}.tar", columns=["jpg", "cls"])
    if source == "own format" and not (folder / "penstock").exists():
        with penstock.DatasetWriter(folder / "penstock", {"jpg": "bytes", "cls": "int64"}) as writer:
            for row in tars:
                writer.write({"jpg": row["jpg"], "cls": int(row["cls"])})
    dataset = tars if source == "tars" else penstock.open(folder / "penstock")
    plan = dataset.shuffle(seed=1).map(penstock.pure(ROWS[decoder])).batch(BATCH)
    return turn(iter(penstock.DataLoader(plan, num_workers=workers, workers=kind, epochs=None)), source)


def spdl(folder: Path, arm: str) -> Turn:
    """With its own decoder, FFmpeg's, which decodes and resizes a whole batch in a thread."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    paths = sorted((folder / "images").rglob("*.jpg"))

    def orders() -> Iterator[list[str]]:
        for number in itertools.count():
            order = np.random.default_rng(number).permutation(len(paths)).reshape(-1, BATCH)
            yield from ([str(paths[index]) for index in indices] for indices in order)

    def load(names: list[str]) -> Any:
        import torch

        images = spdl.io.to_torch(spdl.io.load_image_batch(names, width=SIZE, height=SIZE, pix_fmt="rgb24"))
        return images, torch.tensor([int(Path(name).parent.name[-1]) for name in names])

    builder = PipelineBuilder().add_source(orders()).pipe(load, concurrency=2).add_sink(4)
    pipeline = builder.build(num_threads=2)
    pipeline.start()
    return turn(iter(pipeline.get_iterator()), "a folder")


def web(folder: Path, arm: str) -> Turn:
    import webdataset

    source, decoder, workers = options_of(arm)
    images = webdataset.WebDataset(str(folder / "images-{000..007}.tar"), shardshuffle=8).shuffle(1000).repeat()
    samples = images.map(lambda sample: (DECODERS[decoder](sample["jpg"]), int(sample["cls"])))
    batched = samples.batched(BATCH, partial=False)
    return turn(iter(webdataset.WebLoader(batched, batch_size=None, num_workers=workers)), source)


def litdata(folder: Path, arm: str) -> Turn:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    source, decoder, workers = options_of(arm)
    if not (folder / "litdata").exists():
        (folder / "litdata").mkdir()
        writer = BinaryWriter(str(folder / "litdata"), chunk_bytes="64MB")
        for number, path in enumerate(sorted((folder / "images").rglob("*.jpg"))):
            writer[number] = {"jpg": path.read_bytes(), "cls": int(path.parent.name[-1])}
        writer.done()
        writer.merge()
    dataset = StreamingDataset(str(folder / "litdata"), shuffle=True, drop_last=True, transform=ROWS[decoder])
    loader = StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    return turn(endless(lambda: loader), source)


def every(source: str, *workers: str) -> tuple[str, ...]:
    return tuple(f"{source}, {decoder}, {each}" for decoder in DECODERS for each in workers)


OURS = (
    *every("a folder", "2 workers"),
    *every("tars", "2 threads", "2 processes"),
    *every("own format", "2 threads", "2 processes"),
)
QUESTION = Question(
    title="Photographs",
    measures=dict.fromkeys(("a folder", "tars", "own format"), "images/s"),
    same="4,096 JPEGs of 500 x 375, shuffled, to batches of 32 x 224 x 224 x 3 uint8 with labels. A folder of classes, "
    "tars of WebDataset, or the library's own format. Penstock reads the folder with torch's dataset, as a drop-in.",
    limit="Decoding and resizing on both cores, keeping nothing.",
    why="Decoding is most of the work, and the same decoder does it. What differs is how batches reach the loop.",
    prepare=prepare,
    rounds=3,
    peers=(
        Peer("bare decode", bare, tuple(DECODERS), "limit", ("pillow", "opencv-python-headless")),
        Peer("Penstock", penstock, OURS, "ours", ("penstock-data",)),
        Peer("torch", torch, every("a folder", "0 workers", "2 workers"), packages=("torch",)),
        Peer("torchvision v2", torchvision, packages=("torchvision",)),
        Peer("SPDL", spdl, ("a folder, FFmpeg, 2 workers",), packages=("spdl-io",)),
        Peer("WebDataset", web, every("tars", "0 workers", "2 workers"), packages=("webdataset",)),
        Peer("LitData", litdata, every("own format", "0 workers", "2 workers"), packages=("litdata",)),
    ),
)

if __name__ == "__main__":
    run(QUESTION)
