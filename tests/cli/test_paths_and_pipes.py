"""Paths as people type them, readers that go away, and files that follow the umask."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.cli import main
from penstock.dataset import verify
from penstock.preparation import Progress, prepare
from penstock.transforms import Tokenize

COMMAND = [sys.executable, "-m", "penstock.cli"]


@pytest.fixture
def dataset(tmp_path: Path, inline: None) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"row {n}", "n": n}) + "\n" for n in range(500)))
    prepare(tmp_path / "a.jsonl", tmp_path / "data", workers=1)
    return tmp_path / "data"


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", Path("s3://bucket/x"), "https://a.org/x"])
def test_a_url_where_only_a_path_will_do_is_refused_and_no_folder_of_that_name_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    calls: list[Any] = [
        lambda: penstock.DatasetWriter(url, {"x": "int64"}),
        lambda: penstock.load_plan(url),
        lambda: Tokenize(url),
    ]
    if isinstance(url, Path):  # a URL that has lost a slash
        calls += [lambda: penstock.open(url), lambda: verify(url), lambda: prepare("a.jsonl", url, workers=1)]
    for call in calls:
        with pytest.raises(ValueError, match=r"//(bucket|a\.org)/x is a URL, but .* must be local"):
            call()
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}], "text": "hi"}\n')
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / name / "0.png")
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    chat = Tokenize("bytes", chat_template="~/template.jinja", loss_mask=False)
    assert prepare("~/a.jsonl", "~/chat", transform=chat, workers=1).path == tmp_path / "chat"
    prepare("~/images", "~/pictures", classes="~/classes.txt", workers=1)
    assert penstock.open("~/pictures").classes == ("dog", "cat")
    plan = penstock.open("~/chat").batch(1)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert penstock.load_plan("~/plan.toml") == plan
    assert verify("~/chat").is_sound
    assert not penstock.is_stale("~/chat")
    assert [record["text"] for record in penstock.stream("~/a.jsonl")] == ["hi"]
    assert main(["inspect", "~/chat"]) == main(["verify", "~/chat"]) == 0
    with penstock.DatasetWriter("~/written", {"x": "int64"}) as writer:
        writer.write({"x": 1})
    assert len(penstock.open("~/written")) == 1


def test_a_tilde_that_the_shell_left_in_an_option_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("print('nothing to look at')")
    main(["doctor", "--html=~/report.html", "--", str(tmp_path / "train.py")])
    assert "<html" in (tmp_path / "report.html").read_text()
    assert main(["certificates", "~/tls", "localhost"]) == 0
    assert (tmp_path / "tls").is_dir()


def test_what_certificates_says_to_type_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["certificates", "my keys", "localhost"]) == 0
    typed = shlex.split(capsys.readouterr().out.splitlines()[0])
    assert typed[typed.index("--key") + 1] == "my keys/server.key"


@pytest.mark.parametrize(
    ("host", "said"), [("cpu1:8815", "leave out the port, as in cpu1."), ("", "''"), ("a b", "'a b'")]
)
def test_what_is_no_host_gets_no_certificate(
    host: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certificates", str(tmp_path / "keys"), "::1", "*.cluster", host]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


def test_top_looks_once_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:1"]) == 1
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb",
    [
        "inspect",
        "verify --json",
        "prepare",
        *(pytest.param(verb, marks=pytest.mark.stress) for verb in ("inspect --json", "verify", "prepare --json")),
    ],
)
def test_a_reader_that_goes_away_is_no_failure(dataset: Path, verb: str) -> None:
    sources = f"{dataset.parent}/a.jsonl" if verb.startswith("prepare") else ""
    destination = f"{dataset}-{'json' in verb}" if sources else dataset
    name, *flags = verb.split()
    line = f"set -o pipefail; {' '.join(COMMAND)} {name} {sources} {destination} {' '.join(flags)} | true"
    done = subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(penstock.open(destination)) == 500


def test_help_may_be_cut_short_and_faults_are_faults_even_if_nobody_reads_them(dataset: Path) -> None:
    for arguments, code in ((["--help"], 0), (["prepare", "--help"], 0), (["verify", str(dataset)], 1)):
        if "verify" in arguments:
            shard = next(dataset.glob("*.safetensors"))
            shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        line = f"set -o pipefail; {' '.join([*COMMAND, *arguments])} | true"
        done = subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, "")


SHUFFLE = ["--shuffle", "1"]
OTHER_MASKS = [(0o002, []), (0o077, []), (0o002, SHUFFLE), (0o022, []), (0o022, SHUFFLE)]


@pytest.mark.parametrize(
    ("mask", "flags"),
    [(0o077, SHUFFLE), *(pytest.param(*case, marks=pytest.mark.stress) for case in OTHER_MASKS)],
)
def test_every_file_of_a_preparation_follows_the_umask(tmp_path: Path, mask: int, flags: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 100)
    line = f"umask {mask:o}; exec {' '.join(COMMAND)} prepare a.jsonl data --tokenizer bytes --pack 8 --workers 1 "
    subprocess.run(["/bin/bash", "-c", line + " ".join(flags)], cwd=tmp_path, check=True, capture_output=True)
    paths = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    assert len(paths) > 3
    for path in paths:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path.name


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("num_tasks", [0, 1])
def test_an_interrupted_run_says_what_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, num_tasks: int
) -> None:
    for name in "ab":
        rows = [{"text": f"{name} {number} " * 300} for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def interrupt(self: Any, progress: Progress) -> None:
        if progress.tasks >= num_tasks:
            raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli._prepare.show_progress", lambda as_json: _Listener(interrupt))
    command = ["prepare", f"{tmp_path}/*.jsonl", str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "1"]
    assert main([*command, "--shard-bytes", "20KB"]) == 130
    shown = capsys.readouterr().err
    if num_tasks:
        assert re.search(r"interrupted\. \d+ of \d+ tasks? finished and kept; run the same command", shown)
    else:
        assert "No task was finished, so nothing is kept; the same command starts over." in shown


class _Listener:
    """Stands in for the progress bar."""

    def __init__(self, listen: Any) -> None:
        self._listen = listen

    def __enter__(self) -> Any:
        return lambda progress: self._listen(self, progress)

    def __exit__(self, *error: object) -> None:
        pass


def test_one_of_a_thing_is_not_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with penstock.DatasetWriter(tmp_path / "data", {"x": "int64"}) as writer:
        writer.write({"x": np.int64(1)})
    assert main(["inspect", str(tmp_path / "data")]) == main(["verify", str(tmp_path / "data")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("1 sample in 1 shard, ") == 2
    assert ": 1 sample; " in repr(penstock.open(tmp_path / "data"))


def test_the_command_is_also_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"penstock {penstock.__version__}\n"
