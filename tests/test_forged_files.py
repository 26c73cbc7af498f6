"""Whatever a stranger wrote into a dataset, or beside it: it is used, or refused by an error of ours.

One or two places of a manifest, a provenance file, the files of an unfinished run or a plan file hold something else,
under right checksums; or a link, pipe or folder is where a file should be. Every verb that reads them then runs within
limits of memory and time, asks nobody on the network, and leaves the files of others alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import socket
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import pytest

import penstock
from guarding import guarded, listening, naming, use_or_refuse
from mutating import mutate
from penstock.cli import main
from penstock.errors import FormatError, printable
from penstock.identity import digest
from penstock.plan._text import write_toml
from penstock.preparation import Progress, find_unfinished, is_stale
from penstock.preparation._engines import InlineTaskEngine
from penstock.shards import Provenance
from preparation.corpora import write_jsonl
from shards.forging import manifest_of, put_manifest


@dataclass(frozen=True)
class Example:
    """What forgeries start from; they are made in `folder`, each from a fresh copy of one of the datasets."""

    raw: Path
    finished: Path
    unfinished: Path
    precious: Path
    folder: Path
    server: str

    @property
    def nasty(self) -> list[Any]:
        """Values that lead elsewhere."""
        return [f"http://{self.server}/a.jsonl", str(self.precious), f"{self.precious}/*", "../precious/thesis.tex"]


def run(raw: Path, data: Path, **more: Any) -> Any:
    transform = penstock.Tokenize("bytes")
    return penstock.prepare(
        raw, data, transform=transform, workers=1, shard_bytes=2_000, pack=64, on_error="skip", **more
    )


def stop_after_a_task(progress: Progress) -> None:
    if progress.tasks:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    folder = tmp_path_factory.mktemp("strangers")
    for name in ("raw", "precious/letters", "forged"):
        (folder / name).mkdir(parents=True)
    for number in range(2):
        write_jsonl(folder / "raw" / f"{number}.jsonl", 12, number)
    with open(folder / "raw" / "0.jsonl", "a") as file:
        file.write("no JSON\n")
    for name in ("thesis.tex", "letters/mother.txt", "manifest.json", "recipe.json"):
        (folder / "precious" / name).write_text("irreplaceable")
    with pytest.MonkeyPatch.context() as patch, listening() as server:
        # Workers would be out of sight, and take a second to start: their tasks are done here.
        patch.setattr("penstock.preparation._engines.LocalEngine", lambda *_: InlineTaskEngine())
        run(folder / "raw", folder / "finished")
        with pytest.raises(KeyboardInterrupt):
            run(folder / "raw", folder / "unfinished", on_progress=stop_after_a_task)
        yield Example(
            folder / "raw", folder / "finished", folder / "unfinished", folder / "precious", folder / "forged", server
        )


Forge = Callable[[Example, random.Random], Path]
"""Makes a forgery and returns where it is."""


def fresh_copy(example: Example, of: Path) -> Path:
    place = example.folder / "data"
    shutil.rmtree(place, ignore_errors=True)
    return shutil.copytree(of, place, symlinks=True)


def forge_manifest(example: Example, generator: random.Random) -> Path:
    """Half of the time in what `prepare` wrote about itself, else anywhere."""
    place = fresh_copy(example, example.finished)
    fields = manifest_of(place)
    if generator.random() < 0.5:
        part = generator.choice(["preparation", "packing", "skipped", "transform", "tokenizer"])
        fields["attributes"][part] = mutate(fields["attributes"][part], generator, example.nasty)
    else:
        fields = mutate(fields, generator, example.nasty)
    put_manifest(place, fields if isinstance(fields, dict) else {"format": fields})
    return place


def forge_provenance(example: Example, generator: random.Random) -> Path:
    place = fresh_copy(example, example.finished)
    content = json.loads(next(place.glob("provenance-*")).read_bytes())
    put_provenance(place, mutate(content, generator, example.nasty))
    return place


def put_provenance(place: Path, content: Any) -> None:
    """Another provenance file, which the manifest agrees with."""
    fields = manifest_of(place)
    (place / fields["provenance"]["name"]).unlink()
    data = json.dumps(content).encode()
    name = f"provenance-{digest(data, 8)}.json"
    (place / name).write_bytes(data)
    fields["provenance"] = {"name": name, "bytes": len(data), "crc32c": f"{crc32c.crc32c(data):08x}"}
    put_manifest(place, fields)


def forge_work_folder(example: Example, generator: random.Random) -> Path:
    """A file of an unfinished run."""
    place = fresh_copy(example, example.unfinished)
    path = generator.choice(sorted((place / ".preparing").rglob("*.json")))
    path.write_text(json.dumps(mutate(json.loads(path.read_bytes()), generator, example.nasty)))
    return place


def forge_places(example: Example, generator: random.Random) -> Path:
    """Links, pipes, sockets and folders where files or folders should be."""
    place = fresh_copy(example, generator.choice([example.finished, example.unfinished]))
    (place / ".writing").mkdir()
    for name in (".lock", "run.json", ".writing/manifest.json", ".writing/previous.json"):
        (place / name).write_text(json.dumps(generator.choice([{"pid": "\x1b[2J", "host": 1, "command": []}, [], 5])))
    for _ in range(generator.choice((1, 2))):
        path = generator.choice(sorted(place.rglob("*")))
        (shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink)(path)
        plant(
            path, generator.choice(["link", "link to a folder", "link to nothing", "pipe", "socket", "folder"]), example
        )
    return place


def plant(path: Path, kind: str, example: Example) -> None:
    match kind:
        case "link":
            path.symlink_to(example.precious / "thesis.tex")
        case "link to a folder":
            path.symlink_to(example.precious)
        case "link to nothing":
            path.symlink_to(example.precious / "new")
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)  # whose path may not be long
        case _:
            path.mkdir()
            (path / "inner").write_text("x")


def uses(place: Path, raw: Path) -> Iterator[Callable[[], object]]:
    """Everything that reads a dataset; what changes it comes last."""
    yield lambda: read(place, "map")
    yield lambda: read(place, "pread")
    yield lambda: penstock.open(place).shuffle(seed=1).pack(64).batch(2).read(0)
    yield lambda: penstock.verify(place)
    yield lambda: show(place)
    yield lambda: look_closer(place)
    yield lambda: penstock.advise(place, measure=True)
    yield lambda: stage(place)
    yield lambda: find_unfinished(place)
    yield lambda: is_stale(place, sources=raw)
    yield lambda: is_stale(place, schemes=())
    yield lambda: run(raw, place)
    yield lambda: append(place)
    yield lambda: run(raw, place, overwrite=True)


def read(place: Path, io: Any) -> None:
    ds = penstock.open(place, io=io)
    few = [index for index in (0, len(ds) // 2, len(ds) - 1) if 0 <= index < len(ds)]
    ds.read(few)
    for index in few:
        assert isinstance(ds[index], dict)
        assert isinstance(ds.origin(index), str | None)
    assert isinstance(ds.classes, tuple)
    assert isinstance(ds.tokenizers, dict)


def look_closer(place: Path) -> None:
    """What needs to know where samples came from, and what was there before."""
    ds = penstock.open(place, as_of=penstock.open(place).fingerprint)
    if len(ds) > 1:
        ds.shuffle(seed=1).batch(2).documents(0)
    if Provenance(ds.storage).is_complete:
        assert sum(map(len, ds.split({"a": 0.5, "b": 0.5}, seed=1, by="file").values())) == len(ds)


def stage(place: Path) -> None:
    scratch = place.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    penstock.stage(place, scratch)


def show(place: Path) -> None:
    """`inspect`, whose text is safe to print."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        is_refused = main(["inspect", str(place), "--samples", "2"])
        assert main(["inspect", str(place), "--samples", "2", "--json"]) == is_refused
    assert "out of memory" not in out.getvalue()
    assert printable(out.getvalue(), keep="\n\t") == out.getvalue()


def append(place: Path) -> None:
    columns = penstock.open(place).schema.to_json()
    penstock.DatasetWriter(place, columns, mode="append").close()


FORGERIES: dict[str, Forge] = {
    "manifest": forge_manifest,
    "provenance": forge_provenance,
    "unfinished run": forge_work_folder,
    "places": forge_places,
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "num_examples", [pytest.param(12, id="short"), pytest.param(400, id="long", marks=pytest.mark.stress)]
)
@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_dataset_is_used_or_refused_by_an_error_of_ours(
    kind: str, num_examples: int, example: Example
) -> None:
    for seed in range(num_examples):
        place = FORGERIES[kind](example, random.Random(f"{kind} {seed}"))
        for number, use in enumerate(uses(place, example.raw)):
            with naming(f"{kind}, seed {seed}, use {number}"), guarded(example.precious, example.raw):
                use_or_refuse(use)


def plan_texts(example: Example) -> list[str]:
    ds, series = penstock.open(example.finished), make_series(example.folder / "series")
    plans = [
        ds.shuffle(seed=3).pack(64).batch(2),
        ds.shuffle(seed=3, mode="full").window(16).batch(4),
        ds.select_columns(["tokens"]).batch(1),
        penstock.mix({"a": (ds.shuffle(seed=1).pack(32), 0.5), "b": (ds.pack(32), 0.5)}, seed=2, rows=20).batch(2),
        ds.split({"train": 0.8, "test": 0.2}, seed=1)["train"].shuffle(seed=1).pack(32).batch(2),
        penstock.concat(ds, ds.split({"a": 0.5, "b": 0.5}, seed=2, by="file")["b"]).shuffle(seed=1).pack(32).batch(2),
        series.select_columns(["steps"]).zip(series.select_columns(["y"])).shuffle(seed=1).batch(2),
        series.unfold(3, 2).shuffle(seed=1).batch(2, tail="drop"),
        series.select_columns(["y"]).sample("y").batch(2),
        series.balance("y").take(rows=9).skip(rows=2).repeat(3).batch(2, tail="pad"),
        penstock.open(example.finished, as_of=ds.fingerprint).shuffle(seed=1).pad(16, bucket=4).batch(2),
        penstock.mix({"a": ds.pack(32), "b": ds.pack(32)}, seed=2, rows=20, temperature=2.0, source_ids=True).batch(2),
    ]
    return [plan.to_toml() for plan in plans]


def make_series(path: Path) -> penstock.Dataset:
    with penstock.DatasetWriter(path, {"steps": "int32[*]", "y": "int64"}) as writer:
        for number in range(12):
            writer.write({"steps": range(5 + number), "y": 1 + number % 3})
    return penstock.open(path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "num_examples", [pytest.param(100, id="short"), pytest.param(10_000, id="long", marks=pytest.mark.stress)]
)
def test_a_forged_plan_file_is_read_from_or_refused_by_an_error_of_ours(num_examples: int, example: Example) -> None:
    path, texts = example.folder / "plan.toml", plan_texts(example)
    for seed in range(num_examples):
        generator = random.Random(f"plan {seed}")
        fields = mutate(tomllib.loads(generator.choice(texts)), generator, example.nasty)
        with contextlib.suppress(TypeError, ValueError, AttributeError, KeyError):  # what TOML cannot say
            path.write_text(write_toml(fields))
        with naming(f"plan, seed {seed}"), guarded(example.precious, example.raw):
            use_or_refuse(lambda: load_and_read(path))


def load_and_read(path: Path) -> None:
    plan = penstock.load_plan(path)
    with contextlib.suppress(MemoryError, IndexError):  # how large a batch is, and whether there is one, the plan says
        plan.read(0)


SECTIONS: list[tuple[list[Any], Any]] = [
    (["preparation", "patterns"], 5),
    (["preparation", "patterns"], [None]),
    (["preparation", "pack"], {"a": 1}),
    (["preparation", "recipe"], []),
    (["preparation", "recipe", "reading"], {}),
    (["preparation", "recipe", "reading", "format"], "exe"),
    (["preparation", "recipe", "task_bytes"], 0),
    (["preparation", "recipe", "origins"], "elsewhere"),
    (["preparation", "tasks"], [5]),
    (["preparation", "tasks"], [[1, 2, 3]]),
    (["preparation", "tasks"], [[1, 10**6]]),
    (["preparation", "tasks", 0], [1, 1, {"bad": -1}, []]),
    (["preparation", "tasks", 0], [1, 1, {"bad": 1}, [["only", 1]]]),
    (["transform"], "x"),
]


@pytest.mark.parametrize(("keys", "value"), SECTIONS)
def test_what_does_not_say_how_a_dataset_was_prepared_is_a_format_error(
    keys: list[Any], value: Any, example: Example
) -> None:
    place = fresh_copy(example, example.finished)
    fields = manifest_of(place)
    part = fields["attributes"]
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    put_manifest(place, fields)
    for use in (lambda: is_stale(place, sources=example.raw), lambda: run(example.raw, place)):
        with pytest.raises(FormatError, match=r"does not say how it was prepared: .*--overwrite"):
            use()
    run(example.raw, place, overwrite=True)
    assert penstock.verify(place).is_sound
    assert not is_stale(place)


@pytest.mark.parametrize(
    ("key", "value"),
    [("sources", 5), ("sources", [["a", 1]]), ("sources", [["a", "b", "c"]]), ("origins", {"files": []})],
)
def test_provenance_of_another_shape_is_a_format_error(key: str, value: Any, example: Example) -> None:
    place = fresh_copy(example, example.finished)
    put_provenance(place, json.loads(next(place.glob("provenance-*")).read_bytes()) | {key: value})
    with pytest.raises(FormatError, match=r"does not say how it was prepared|'origins' must be files"):
        run(example.raw, place)
