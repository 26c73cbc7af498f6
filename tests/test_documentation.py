"""What the documentation shows runs as it stands, on data made for it, and what it points to is there."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import re
import shlex
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from markdown.extensions.toc import slugify
from PIL import Image
from torch.utils.data import TensorDataset

import penstock
from given import GIVEN
from pages import blocks_of, follow
from penstock.cli import main
from penstock.service import make_certificates

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GENERATED = {"reference/python.md", "reference/cli.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}


def snippets(page: str, kind: str = "python") -> list[str]:
    return [block.text for block in blocks_of((ROOT / page).read_text()) if block.language == kind]


def snippet_with(page: str, text: str) -> str:
    """The first snippet of a page that has this text."""
    return next(snippet for snippet in snippets(page) if text in snippet)


def run(snippet: str, **names: Any) -> dict[str, Any]:
    """Run a snippet in which these names are known; what is known afterwards."""
    space: dict[str, Any] = {"__name__": "__main__", "penstock": penstock, "torch": torch, **names}
    exec(snippet, space)
    return space


class Model:
    """Stands where the reader's model would; notes what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, *inputs: Any) -> float:
        self.given.append(inputs)
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and the current one, with raw data under the names that the pages use."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus", "tokenizer"):
        GIVEN[name]()
    return tmp_path


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> penstock.Dataset:
    """The prepared dataset that the pages open."""
    monkeypatch.chdir(tmp_path)
    with penstock.DatasetWriter("data/corpus", {"tokens": "uint16[*]"}) as writer:
        writer.write_batch({"tokens": [range(1, length) for length in range(20, 800)]})
    return penstock.open("data/corpus")


def test_the_six_snippets_of_the_readme(raw: Path) -> None:
    model, rows = Model(), TensorDataset(torch.arange(128))
    space = follow((ROOT / "README.md").read_text(), torch=torch, torch_dataset=rows, model=model)
    batches = space["plan"].num_batches()
    ids, positions, mask, labels = model.given[0]
    assert ids.shape == positions.shape == labels.shape == (32, 4096)
    assert mask.shape[-2:] == (4096, 4096)
    assert len(parts := space["parts"]) == 2 and min(map(len, parts.values())) > 0  # noqa: PT018
    (resumed,) = model.given[batches]
    assert resumed.equal(model.given[1][0])  # the checkpoint was made after step 0
    assert space["watched"].summary().num_steps == batches - 1


def test_preparing_by_command_and_by_function_is_the_same(raw: Path) -> None:
    command, *_ = snippets("docs/preparation.md", kind="")
    assert main(shlex.split(command)[1:]) == 0
    prepared = penstock.open("data/corpus").fingerprint
    run(snippets("docs/preparation.md")[0])  # finds that all is done
    assert penstock.open("data/corpus").fingerprint == prepared
    assert main(["verify", "data/corpus"]) == main(["inspect", "data/corpus"]) == 0


def test_fine_tuning_data_and_parts(raw: Path) -> None:
    _, chats, _pictures, parts = snippets("docs/preparation.md", kind="")  # pictures: tests/transforms/test_pictures.py
    Path("models/mine").mkdir(parents=True)
    shutil.copy("tokenizer.json", "models/mine")
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    Path("models/mine/tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    Path("chats.jsonl").write_text(json.dumps({"data": {"conversations": turns}}) + "\n")
    for command in (chats, parts):
        assert main(shlex.split(command)[1:]) == 0
    assert len(penstock.open("data/chats")) == 1
    assert len(penstock.open("data/parts/train")) > len(penstock.open("data/parts/val"))


def test_datasets_joined_raw_files_and_series(corpus: penstock.Dataset) -> None:
    first, joining, header, series, *_ = snippets("docs/datasets.md")
    assert len(run(first)["small"]) == 64
    with penstock.DatasetWriter("data/more", {"tokens": "uint16[*]"}) as writer:
        writer.write({"tokens": [1, 2, 3]})
    assert len(run(joining, np=np)["both"]) == len(corpus) + 1
    steps = np.arange(400, dtype=np.float32).reshape(100, 4)
    Path("steps.bin").write_bytes(struct.pack("2IH", *steps.shape, steps.dtype.num) + steps.tobytes())
    assert np.array_equal(run(header, np=np)["ds"][:]["data"], steps)
    assert run(series)["plan"].read(0)["x"].shape == (16, 24, 4)


def scenes() -> Iterator[dict[str, Any]]:
    """Images of several sizes, each with a mask and some boxes."""
    for number in range(12):
        height, width = 40 + number, 50 + 2 * number
        files = [io.BytesIO(), io.BytesIO()]
        pixels = np.full((height, width, 3), number, np.uint8)
        for file, array in zip(files, (pixels, pixels[:, :, 0]), strict=True):
            Image.fromarray(array).save(file, "png")
        boxes = [[1.0, 2.0, 30.0 + box, 35.0] for box in range(number % 3)]
        image, mask = (file.getvalue() for file in files)
        yield {"image": image, "mask": mask, "boxes": boxes, "labels": list(range(number % 3))}


def test_images_with_masks_and_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, recipe, torchvision, albumentations = snippets("docs/datasets.md")[4:]
    run(prepare, scenes=scenes())
    space = run(recipe, np=np)
    batch = space["plan"].read(0)
    assert len({image.shape for image in batch["image"]}) > 1
    assert [len(boxes) for boxes in batch["boxes"]] == [len(labels) for labels in batch["labels"]]
    ds = penstock.open("data/scenes")
    for package, snippet, name in (
        ("torchvision", torchvision, "with_torchvision"),
        ("albumentations", albumentations, "with_albumentations"),
    ):
        if importlib.util.find_spec(package) is not None:
            function = run(snippet, np=np, decode=space["decode"])[name]
            plan = ds.shuffle(seed=7).map(function, ragged=["boxes", "labels"]).batch(4)
            batch, again = plan.read(1), plan.read(1)
            assert {np.asarray(image).shape[-1] for image in batch["image"]} <= {3, 32}
            for key in ("image", "mask"):
                assert np.array_equal(batch[key], again[key])
            assert batch["boxes"].offsets.tolist() == batch["labels"].offsets.tolist()


def test_plans_and_mixtures(corpus: penstock.Dataset) -> None:
    one, split, lengths, uneven, mixture = (
        snippet_with("docs/plans.md", text) for text in ("step=123_456", ".split(", "300e9", "ragged=", "penstock.mix")
    )
    parts = run(split)["parts"]
    assert len(parts["train"]) + len(parts["val"]) == len(corpus)
    run(one.replace("123_456", "0"))  # so far into an epoch is only large data
    objects = {"boxes": [np.ones((count, 4)) for count in range(9)], "labels": [np.ones(count) for count in range(9)]}
    scenes = penstock.from_arrays({"image": np.zeros((9, 2, 2)), **objects})
    target = run(uneven, ds=scenes)["plan"].read(0)["target"]
    assert target["boxes"].lengths.tolist() == target["labels"].lengths.tolist()
    scheduled = run(snippet_with("docs/plans.md", "schedule="), web=corpus, math=corpus)["plan"]
    assert "from row 1,200,000 on: web 0/65536" in repr(scheduled)
    plan = run(mixture, web=corpus, code=corpus)["plan"]
    assert plan.read(0)["input_ids"].shape == (32, 4096)
    assert run(lengths.replace("1000", "10"))["budget"].num_rows == 300_000_000_000 // 4096


def test_data_that_has_grown(corpus: penstock.Dataset) -> None:
    with penstock.DataLoader(corpus.shuffle(seed=7).pack(4096).batch(32)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with penstock.DatasetWriter("data/corpus", corpus.schema.to_json(), mode="append") as writer:
        writer.write({name: corpus[0][name] for name in corpus.schema})
    told = run(snippet_with("docs/plans.md", "as_of="), state=state)
    assert len(told["before"]) == len(corpus) < len(penstock.open("data/corpus"))


def test_columns_beside_tokens_padding_and_weights(corpus: penstock.Dataset) -> None:
    beside, padding, drawn = (snippet_with("docs/plans.md", text) for text in ('"text"]', ".pad(", ".balance("))
    columns = {"tokens": corpus[:]["tokens"], "domain": np.arange(len(corpus)) % 3, "text": [b"x"] * len(corpus)}
    lengths = columns["tokens"].lengths
    columns["weight"] = penstock.Ragged.from_lengths(np.ones(lengths.sum(), np.float32), lengths)
    told = run(beside.replace('penstock.open("data/corpus")', "rich"), rich=penstock.from_arrays(columns))
    assert told["domain_of_token"].shape == (8, 4096)
    assert run(padding)["batch"]["input_ids"].shape[1] % 8 == 0
    images = {"images": np.zeros((99, 2)), "labels": np.arange(99) % 4, "scores": np.ones(99)}
    assert np.bincount(run(drawn, **images)["balanced"].read(0)["label"]).tolist() == [16] * 4


def test_loading(corpus: penstock.Dataset) -> None:
    plan = corpus.shuffle(seed=7).pack(4096).batch(4)
    space = run(snippets("docs/loading.md")[0], plan=plan)
    assert space["batch"]["input_ids"].shape == (4, 4096)


def test_state_in_place_of_torchs_loader() -> None:
    line, state = snippets("docs/drop-in.md")
    loader = run(line)["DataLoader"](torch.arange(100), batch_size=10, shuffle=True)
    seen = [batch for batch, _ in zip(loader, range(3), strict=False)]
    space = run(state, loader=loader, checkpoint={})
    rest = run("rest = [*seen, *loader, *loader]", loader=loader, seen=seen)["rest"]
    assert space["checkpoint"]["data"]
    assert all(batch.shape == (10,) for batch in rest)


def test_masks(corpus: penstock.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling takes half a minute, and is done in `tests/masks`.
    monkeypatch.setattr(torch, "compile", lambda function: lambda q, k, v, block_mask: q + block_mask.shape[-1])
    flex, hugging_face, _pictures, check, context = snippets("docs/masks.md")  # pictures: tests/masks/test_pictures.py
    loader = penstock.DataLoader(corpus.pack(256).batch(2), workers="inline")
    values = torch.randn(3, 2, 1, 256, 16)
    space = run(flex, loader=loader, **dict(zip("qkv", values, strict=True)))
    assert space["out"].shape == (2, 1, 256, 16)
    known = {name: space[name] for name in ("masks", "batch")}
    table = torch.randn(1000, 8)
    model = lambda **inputs: SimpleNamespace(loss=inputs, logits=table[inputs["input_ids"]])  # noqa: E731
    assert run(context, **known)["part"]["input_ids"].shape == (2, 64)
    given = run(hugging_face, model=model, **known)["loss"]
    assert given["input_ids"].shape == (1, 2 * 256)
    run(check, batch=space["batch"], vocab_size=1000, model=lambda batch: table[batch["input_ids"]])


def test_streams(raw: Path) -> None:
    space = run(snippets("docs/streams.md")[0])
    assert set(space["batch"]) == {"text", "label"}
    assert space["checkpoint"]


def test_servers(raw: Path) -> None:
    arrays = {"x": np.arange(400, dtype=np.uint16).reshape(100, 4), "y": np.arange(100)}
    plan = penstock.from_arrays(arrays).shuffle(seed=1).batch(8)
    use, secure, client = snippets("docs/service.md")
    with penstock.serve(plan, "127.0.0.1:0", num_workers=1) as server:
        for name in ("cpu1:8815", "cpu2:8815"):
            use = use.replace(name, server.address)
        run(use, plan=plan)["loader"].close()
        read = run(client)["read"]
        for step, epoch in ((0, 0), (11, 0), (3, 7), (2, 9)):
            found, expected = read(server.address, step, epoch), plan.read(step, epoch)
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
    files = make_certificates(raw / "keys", ["cpu1", "cpu2"])
    security = run(secure)["security"]
    assert Path(security.key).samefile(files.client[1])
    assert security.client_context() is not None
    for option in re.findall(r"keys/[\w.]+", (ROOT / "docs/service.md").read_text()):
        assert (raw / option).is_file()


def test_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = snippets("docs/watch.md")
    run(first, loader=[1, 2, 3], model=Model())
    assert "penstock watch" in (tmp_path / "report.html").read_text()
    loader = penstock.DataLoader(torch.arange(800), batch_size=8)
    space = run(second, loader=loader, model=Model(), device="cpu", history=[])
    assert [step for step, _ in space["history"]] == [50, 100, 150, 200]
    assert space["checkpoint"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job, use = snippets("docs/settings.md")
    (tmp_path / "settings_job.py").write_text(job.replace("[0, 1, 2, 4]", "[0, 1]").replace("[2, 4, 8]", "[2]"))
    assert main(["tune", "settings_job.py", "--steps", "2", "--rounds", "2"]) == 0
    assert len(run(use, dataset=torch.arange(128))["loader"]) == 2


def without_blocks(page: Path) -> str:
    """The page's text beside its fenced blocks, where a `#` is a heading."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link to a page may end in: its headings as the site writes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_anchors_and_paths_lead_somewhere(page: Path) -> None:
    text = without_blocks(page)
    links = [link for link in re.findall(r"\]\(([^)\s]+)", text) if "://" not in link]
    files = [(link, (page.parent / link.partition("#")[0]).resolve() if link[0] != "#" else page) for link in links]
    there = {ROOT / "docs" / name for name in GENERATED}
    assert [link for link, file in files if not file.exists() and file not in there] == []
    pointed = [(link, file) for link, file in files if "#" in link and file.suffix == ".md" and file.exists()]
    assert [link for link, file in pointed if link.partition("#")[2] not in anchors(file)] == []
    paths = re.findall(r"(?<![\w./])(?:tests|benchmarks|examples|src|docs)/[\w./-]+\b", page.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_site_has_every_page_and_no_other() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in pages(each)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert sorted(listed) == sorted(written | GENERATED)


def test_the_tests_that_the_table_of_arguments_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "drop-in.md").read_text()))
    code = "".join(path.read_text() for path in (ROOT / "tests" / "pytorch").glob("*.py"))
    assert named
    assert sorted(name for name in named if f"def {name}(" not in code) == []


def test_commands_in_running_text_are_ones_that_the_program_takes(capsys: pytest.CaptureFixture[str]) -> None:
    texts = re.findall(r"`(penstock [a-z]+ [^`]+)`", "\n".join(page.read_text() for page in PAGES))
    commands = [shlex.split(text)[1:] for text in texts if "…" not in text]
    assert len(commands) > 3
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([*itertools.takewhile(lambda word: word != "--", command), "--help"])
        assert stopped.value.code == 0, command


def test_the_tree_in_the_guide_for_contributors_is_the_tree() -> None:
    tree = next(block for block in snippets("CONTRIBUTING.md", kind="") if block.startswith("src/penstock/"))
    named = {name.rstrip("/") for line in re.findall(r"^  (\S+(?: \S+)*)", tree, re.MULTILINE) for name in line.split()}
    rooms = {path.name for path in (ROOT / "src" / "penstock").iterdir() if not path.name.startswith("_")}
    assert named == rooms - {"py.typed"}
