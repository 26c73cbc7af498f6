"""What does it cost to leave data where it is? Tars and Arrow folders beside the same data prepared, and beside the
libraries that wrote them.

    python benchmarks/bench_foreign.py                    about three minutes on two cores
    python benchmarks/bench_foreign.py --photos FOLDER    with crops of the pictures in a folder instead of made ones

1. tokens: batches of 32 x 2,048 int64 from documents of 200 to 20,000 int32, in a folder of `save_to_disk` and
   prepared: `plan.read` in the caller's thread, and a loader with two threads. `datasets` has rows of 2,048 already,
   which is less work: `with_format("torch")` in torch's DataLoader, shuffled, with the best number of workers.
2. images: JPEGs of 500 x 375 with labels, shuffled, decoded and resized in two workers: from tars where they are, from
   the same JPEGs prepared, and by WebDataset with the best of its settings, which shuffles a buffer only; in one
   thread, beside nothing but decoding and resizing, which no loader can be faster than.
3. index: the headers of 100,000 members, beside `tar -t` of GNU tar.

All candidates of a question take turns in each round; figures are medians over rounds, of warm caches.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import webdataset
from _machine import print_result
from bench_images import make_jpegs
from PIL import Image

import penstock

ROW, BATCH, IMAGES_PER_BATCH, SIZE = 2048, 32, 32, 224
WARM_BATCHES = 20
"""As many as loaders compute before they are asked for, and more."""


def timed(batches: Iterable[Any], seconds: float, size_of: Callable[[Any], int]) -> float:
    """Things per second, without the first few batches."""
    iterator, count, begin = iter(batches), 0, 0.0
    for number, batch in enumerate(iterator):
        if number == WARM_BATCHES:
            begin = time.perf_counter()
        elif number > WARM_BATCHES:
            count += size_of(batch)
            if time.perf_counter() - begin > seconds:
                break
    return count / (time.perf_counter() - begin)


def in_turns(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each arm gave in each round."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms)[:: 1 if number % 2 else -1]:
            rates[name].append(arms[name]())
    return rates


def ratio(rates: dict[str, list[float]], one: str, other: str) -> float:
    """Median over rounds: of the same round, because the machine changes between rounds."""
    return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))


def medians(rates: dict[str, list[float]]) -> dict[str, float]:
    return {f"{name}, per s": statistics.median(values) for name, values in rates.items()}


def step_by_step(arms: dict[str, Callable[[int], object]], num_steps: int) -> dict[str, float]:
    """Median processor seconds of a batch in the caller's thread: the arms take turns at every step."""
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(num_steps):
        for name in list(arms)[:: 1 if step % 2 else -1]:
            begin = time.thread_time()
            arms[name](step)
            spent[name].append(time.thread_time() - begin)
    return {name: statistics.median(values[num_steps // 3 :]) for name, values in spent.items()}


def reader(plan: penstock.Plan) -> Callable[[int], object]:
    """Reads a step into the memory of the last."""
    out = {key: value for key, value in plan.read(0).items() if isinstance(value, np.ndarray)}
    return lambda step: plan.read(step % (plan.num_rows // BATCH - 1), out=out)


def measure_tokens(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    datasets.disable_progress_bars()
    rng = np.random.default_rng(0)
    lengths = rng.integers(200, 20_000, 4_000)
    documents = [rng.integers(0, 50_000, length, np.int32) for length in lengths]
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    datasets.Dataset.from_dict({"input_ids": documents}, features=features).save_to_disk(folder / "saved")
    with penstock.DatasetWriter(folder / "prepared", {"input_ids": "int32[*]"}) as writer:
        writer.write_batch({"input_ids": documents})
    rows = np.concatenate(documents)[: lengths.sum() // ROW * ROW].reshape(-1, ROW)
    datasets.Dataset.from_dict({"input_ids": rows}, features=features).save_to_disk(folder / "rows")
    plans = {
        name: penstock.open(folder / name).shuffle(seed=1).window(ROW, column="input_ids").batch(BATCH)
        for name in ("saved", "prepared")
    }
    theirs = datasets.load_from_disk(folder / "rows").with_format("torch")

    def torch_loader(workers: int) -> float:
        loader = torch.utils.data.DataLoader(theirs, batch_size=BATCH, shuffle=True, num_workers=workers)
        return timed(loader, seconds, lambda batch: batch["input_ids"].numel())

    def ours(name: str) -> float:
        with penstock.DataLoader(plans[name], num_workers=2) as loader:
            return timed(loader, seconds, lambda batch: batch["input_ids"].numel())

    arms: dict[str, Callable[[], float]] = {
        "Arrow, loader": lambda: ours("saved"),
        "prepared, loader": lambda: ours("prepared"),
        **{f"datasets, {workers} workers": (lambda workers=workers: torch_loader(workers)) for workers in (0, 2)},
    }
    read = step_by_step({name: reader(plan) for name, plan in plans.items()}, 3000)
    rates = in_turns(arms, rounds)
    best = max(("datasets, 0 workers", "datasets, 2 workers"), key=lambda name: statistics.median(rates[name]))
    return {
        **medians(rates),
        "Arrow / prepared, read in the caller's thread": read["prepared"] / read["saved"],
        "Arrow / prepared, loader": ratio(rates, "Arrow, loader", "prepared, loader"),
        f"Arrow / best of datasets ({best})": ratio(rates, "Arrow, loader", best),
    }


def resized(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (SIZE, SIZE))
    return np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


@penstock.pure
def decode(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": resized(row["jpg"]), "label": row["cls"]}


def decode_sample(sample: dict[str, Any]) -> tuple[np.ndarray, int]:
    return resized(sample["jpg"]), int(sample["cls"])


def photos(folder: str | None, number: int) -> list[bytes]:
    """JPEGs of 500 x 375: crops of a folder's pictures, or made ones."""
    if folder is None:
        return make_jpegs(min(number, 64), 500, 375)
    rng, encoded = np.random.default_rng(0), []
    pictures = [Image.open(path).convert("RGB") for path in sorted(Path(folder).iterdir())]
    for place in range(min(number, 256)):
        picture, scale = pictures[place % len(pictures)], rng.uniform(0.6, 1)
        width, height = int(picture.width * scale), int(picture.height * scale)
        left, top = rng.integers(0, picture.width - width + 1), rng.integers(0, picture.height - height + 1)
        buffer = io.BytesIO()
        picture.crop((left, top, left + width, top + height)).resize((500, 375)).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    return encoded


def webdataset_of(folder: Path, buffer: int, is_batched: bool) -> Any:
    source = webdataset.WebDataset(str(folder / "images-{000..007}.tar"), shardshuffle=8).shuffle(buffer)
    source = source.map(decode_sample)
    return source.batched(IMAGES_PER_BATCH) if is_batched else source


def measure_images(folder: Path, rounds: int, seconds: float, pictures: str | None) -> dict[str, Any]:
    encoded, number, num_steps = photos(pictures, 4096), 4096, 90
    with penstock.DatasetWriter(folder / "jpegs", {"jpg": "bytes", "cls": "int64"}) as writer:
        for shard in range(8):
            with webdataset.TarWriter(str(folder / f"images-{shard:03}.tar")) as tar:
                for place in range(shard, number, 8):
                    tar.write({"__key__": f"{place:06}", "jpg": encoded[place % len(encoded)], "cls": place % 10})
                    writer.write({"jpg": encoded[place % len(encoded)], "cls": place % 10})
    tars, prepared = (
        penstock.open(path, **more).shuffle(seed=1).map(decode).batch(IMAGES_PER_BATCH)
        for path, more in ((folder / "images-{000..007}.tar", {"columns": ["jpg", "cls"]}), (folder / "jpegs", {}))
    )

    def ours(plan: penstock.Plan, workers: str) -> float:
        with penstock.DataLoader(plan, num_workers=2, workers=workers) as loader:
            return timed(loader, seconds, lambda batch: len(batch["label"]))

    def theirs(buffer: int, in_worker: bool) -> float:
        source = webdataset_of(folder, buffer, in_worker)
        batch = {"batch_size": None} if in_worker else {"batch_size": IMAGES_PER_BATCH}
        loader = webdataset.WebLoader(source.repeat(), num_workers=2, prefetch_factor=4, **batch)
        return timed(loader, seconds, lambda batch: len(batch[1]))

    peers = {
        f"WebDataset, {buffer}, {how}": (buffer, how == "batched there")
        for buffer, how in ((100, "batched there"), (1000, "batched there"), (100, "batched here"))
    }
    arms: dict[str, Callable[[], float]] = {
        **{f"tars, 2 {kind} workers": (lambda kind=kind: ours(tars, kind)) for kind in ("thread", "process")},
        **{f"prepared, 2 {kind} workers": (lambda kind=kind: ours(prepared, kind)) for kind in ("thread", "process")},
        **{name: (lambda settings=settings: theirs(*settings)) for name, settings in peers.items()},
    }
    endless = {name: iter(webdataset_of(folder, *settings).repeat()) for name, settings in peers.items()}
    some = [encoded[place % len(encoded)] for place in range(IMAGES_PER_BATCH)]
    alone: dict[str, Callable[[int], object]] = {"bare decoding": lambda _: [resized(each) for each in some]}
    alone |= {"tars": tars.read, "prepared": prepared.read}
    for name, (_, in_worker) in peers.items():
        if in_worker:
            alone[name] = lambda step, name=name: next(endless[name])
    spent = step_by_step(alone, num_steps)
    rates = in_turns(arms, rounds)
    best = max(peers, key=lambda name: statistics.median(rates[name]))
    return {
        "mean bytes": sum(map(len, encoded)) / len(encoded),
        **{f"in one thread, {name}, processor ms of a batch": 1000 * value for name, value in spent.items()},
        "in one thread, share of bare decoding": spent["bare decoding"] / spent["tars"],
        "in one thread, tars / prepared": spent["prepared"] / spent["tars"],
        "in one thread, tars / best WebDataset": min(spent[name] for name in spent if name in peers) / spent["tars"],
        **medians(rates),
        **{
            f"tars / prepared, {kind} workers": ratio(rates, f"tars, 2 {kind} workers", f"prepared, 2 {kind} workers")
            for kind in ("thread", "process")
        },
        **{
            f"tars, {kind} workers / {best}": ratio(rates, f"tars, 2 {kind} workers", best)
            for kind in ("thread", "process")
        },
    }


def measure_index(folder: Path, rounds: int) -> dict[str, Any]:
    rng, paths = np.random.default_rng(0), []
    for shard in range(4):
        paths.append(folder / f"many-{shard}.tar")
        with webdataset.TarWriter(str(paths[-1])) as tar:
            for place in range(100_000 // 3 // 4):
                sample = {"jpg": rng.bytes(30_000), "cls": place % 10, "txt": "a caption of usual length " * 3}
                tar.write({"__key__": f"{shard}{place:06}", **sample})
    num_bytes = sum(path.stat().st_size for path in paths)

    def index() -> float:
        for old in folder.glob(".penstock-*"):
            shutil.rmtree(old)
        begin = time.perf_counter()
        penstock.open(folder / "many-*.tar")
        return time.perf_counter() - begin

    def list_them() -> float:
        begin = time.perf_counter()
        for path in paths:
            subprocess.run(["tar", "-tf", str(path)], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - begin

    index()
    rates = in_turns({"index": index, "tar -t": list_them}, rounds)
    known = min(_timed_open(folder) for _ in range(5))
    return {
        "GB": num_bytes / 1e9,
        "index, s per GB": statistics.median(rates["index"]) * 1e9 / num_bytes,
        "tar -t, s per GB": statistics.median(rates["tar -t"]) * 1e9 / num_bytes,
        "index / tar -t": ratio(rates, "index", "tar -t"),
        "open with an index, s": known,
    }


def _timed_open(folder: Path) -> float:
    begin = time.perf_counter()
    len(penstock.open(folder / "many-*.tar"))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--photos", help="a folder of pictures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--only", choices=("tokens", "images", "index"))
    given = parser.parse_args()
    questions: dict[str, Callable[[Path], dict[str, Any]]] = {
        "tokens": lambda folder: measure_tokens(folder, given.rounds, given.seconds),
        "images": lambda folder: measure_images(folder, given.rounds, given.seconds, given.photos),
        "index": lambda folder: measure_index(folder, given.rounds),
    }
    figures: dict[str, Any] = {}
    for name, measure in questions.items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
                figures[name] = measure(Path(folder))
    settings = {"row": ROW, "batch": BATCH, "rounds": given.rounds, "seconds": given.seconds, "photos": given.photos}
    packages = ("datasets", "webdataset", "torch", "pyarrow", "pillow")
    print_result("What does it cost to leave data where it is?", settings, figures, *packages)


if __name__ == "__main__":
    main()
