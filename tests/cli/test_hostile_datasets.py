"""`inspect` and `verify` on a dataset from a stranger: they look at nothing that it names, and show it as text."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli import main
from penstock.errors import FormatError, IncompleteDataset, printable
from preparation.corpora import write_jsonl
from shards.forging import forge_manifest

CLEAR_SCREEN = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m\u202e\r"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_jsonl(folder / "a.jsonl", 5, 1)
    penstock.prepare(folder / "a.jsonl", folder / "data", transform=penstock.Tokenize("bytes"), workers=1)
    return folder / "data"


@pytest.fixture
def dataset(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server that never answers; whoever asked it is waiting to be accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def was_asked(server: socket.socket) -> bool:
    return bool(select.select([server], [], [], 0.2)[0])


def name_sources(dataset: Path, *patterns: str) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["attributes"]["preparation"]["patterns"] = list(patterns)

    forge_manifest(dataset, change)


def run(*arguments: str) -> tuple[int, str]:
    """Exit code of the command, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        return main(arguments), out.getvalue()


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_no_server_that_a_dataset_names_is_asked(dataset: Path, server: socket.socket, verb: str) -> None:
    name_sources(dataset, f"http://127.0.0.1:{server.getsockname()[1]}/part.jsonl")
    assert run(verb, str(dataset))[0] == 0
    assert not was_asked(server)


def test_sources_are_looked_at_when_asked_for(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(dataset), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["staleness"] is None
    assert main(["inspect", str(dataset), "--json", "--sources"]) == 0
    assert json.loads(capsys.readouterr().out)["staleness"] == "up to date"


def test_no_folder_that_a_dataset_names_is_walked(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name_sources(dataset, "/**/*.jsonl")
    monkeypatch.setattr("glob.glob", lambda *_, **__: pytest.fail("walks the disk"))
    assert main(["inspect", str(dataset)]) == 0
    capsys.readouterr()


CHAINS = [
    "reference://::data:application/json;base64,eyJ2ZXJzaW9uIjogMX0=",
    "reference://",
    "s3://bucket/a.jsonl::reference://",
    "simplecache::http://127.0.0.1/a.jsonl",
    "data:text/plain,://",
    "generic://x",
    "memory://x",
    "ftp://127.0.0.1/a.jsonl",
]


@pytest.mark.parametrize("url", CHAINS)
def test_only_plain_urls_of_a_dataset_are_followed_even_when_asked(
    dataset: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec.core

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_, **__: pytest.fail("opens what the dataset names"))
    name_sources(dataset, url)
    with pytest.raises(FormatError, match=r"names the source .* say where to look"):
        penstock.is_stale(dataset)
    assert main(["inspect", str(dataset), "--sources"]) == 0
    assert "Sources: could not be checked" in capsys.readouterr().out


@pytest.mark.parametrize("url", CHAINS[:6])
def test_nobody_chains_urls(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, inline: None) -> None:
    import fsspec.core

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_, **__: pytest.fail("opens a chain"))
    with pytest.raises(ValueError, match=r"are not followed\. Give the path or URL of the files themselves"):
        penstock.prepare(url, tmp_path / "data", workers=1)


def test_a_dataset_may_name_the_kinds_of_urls_that_were_allowed(dataset: Path, server: socket.socket) -> None:
    name_sources(dataset, f"http://127.0.0.1:{server.getsockname()[1]}/part.jsonl")
    with pytest.raises(FormatError, match="only file are followed"):
        penstock.is_stale(dataset, schemes=["file"])
    assert not was_asked(server)


@pytest.mark.parametrize("name", ["tasks.json", "recipe.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "device", "bomb"])
def test_what_is_no_regular_file_in_the_work_folder_is_passed_over(dataset: Path, name: str, kind: str) -> None:
    work = dataset / ".preparing"
    work.mkdir()
    if kind == "pipe":
        os.mkfifo(work / name)
    elif kind == "link":
        (work / name).symlink_to("/dev/zero")
    elif kind == "folder":
        (work / name).mkdir()
    elif kind == "device":
        (work / name).symlink_to("/dev/tty")
    else:
        (work / name).write_text("[" * 200_000)
    code, shown = run("inspect", str(dataset))
    assert code == 0, shown


def test_a_pipe_in_place_of_a_file_of_the_dataset_is_refused(dataset: Path) -> None:
    for path in [*dataset.glob("shard-*"), *dataset.glob("provenance-*"), dataset / "manifest.json"]:
        held = path.rename(dataset.parent / "held")
        os.mkfifo(path)
        if not path.name.startswith("provenance"):  # which reading does not need
            assert "is not a regular file" in run("inspect", str(dataset))[1]
        assert run("verify", str(dataset))[0] == 1
        held.replace(path)


def test_unfinished_tasks_cannot_lead_out_of_the_work_folder(dataset: Path) -> None:
    work = dataset / ".preparing"
    (work / "records").mkdir(parents=True)
    (dataset.parent / "outside.json").write_text("{}")
    (work / "tasks.json").write_text(json.dumps({"stage": "prepare", "tasks": {"../../../outside": 1}}))
    assert penstock.preparation.find_unfinished(dataset) is None


def test_control_characters_of_a_dataset_are_shown_as_text(dataset: Path) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["attributes"][f"key{CLEAR_SCREEN}"] = {f"inner{CLEAR_SCREEN}": [CLEAR_SCREEN, f"a\n{CLEAR_SCREEN}"]}

    forge_manifest(dataset, change)
    code, shown = run("inspect", str(dataset))
    assert code == 0
    assert printable(shown, keep="\n") == shown
    assert r"\x1b[2J\x1b]52;c;" in shown
    assert r"\u202e" in shown


def test_control_characters_in_errors_are_shown_as_text(tmp_path: Path) -> None:
    name = f"data{CLEAR_SCREEN}"
    code, shown = run("inspect", str(tmp_path / name))
    assert code == 1
    assert printable(shown, keep="\n") == shown
    with pytest.raises(IncompleteDataset) as caught:
        penstock.open(tmp_path / name)
    assert printable(str(caught.value)) == str(caught.value)


def test_control_characters_in_the_names_of_raw_files_are_shown_as_text(tmp_path: Path, inline: None) -> None:
    (tmp_path / "raw").mkdir()
    write_jsonl(tmp_path / "raw" / f"a{CLEAR_SCREEN}.jsonl", 5, 1)
    (tmp_path / "raw" / f"b{CLEAR_SCREEN}.xyz").write_text("no data")
    command = ("prepare", str(tmp_path / "raw"), str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "1")
    code, shown = run(*command)
    assert code == 0
    assert "Skipped files" in shown
    assert printable(shown, keep="\n") == shown
    (tmp_path / "raw" / f"a{CLEAR_SCREEN}.jsonl").rename(tmp_path / "raw" / f"c{CLEAR_SCREEN}.jsonl")
    _, shown = run("inspect", str(tmp_path / "data"), "--sources")
    assert "1 source file new" in shown
    assert printable(shown, keep="\n") == shown
