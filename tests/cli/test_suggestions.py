"""What the command asks when a name was mistyped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import penstock
from penstock.cli import main
from penstock.errors import did_you_mean
from penstock.filesystem import similar_path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: None) -> Path:
    """A folder with one of each thing that a path may name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "text.jsonl").write_text('{"text": "a", "meta": {"source": "web"}}\n')
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "t.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    (tmp_path / "table.csv").write_text("text,label\na,1\nb,2\n")
    (tmp_path / "train.py").touch()
    with penstock.DatasetWriter("corpus", {"tokens": "uint16[*]"}) as writer:
        writer.write({"tokens": [1, 2]})
    (tmp_path / "plan.toml").write_text(penstock.open("corpus").batch(1).to_toml())
    return tmp_path


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("inspcet corpus", "inspect"),
        ("--verison", "--version"),
        ("inspect corpsu", "corpus"),
        ("verify Corpus", "corpus"),
        ("trace plan.tolm --step 0", "plan.toml"),
        ("bench paln.toml", "plan.toml"),
        ("tune trian.py", "train.py"),
        ("doctor -- trian.py", "train.py"),
        ("prepare rwa/text.jsonl out", "raw"),
        ("prepare raw/txet.jsonl out", "raw/text.jsonl"),
        ("prepare rwa/*.jsonl out", "raw"),
        ("prepare raw/text.jsonl out --tokenizer bytes --column txet --workers 1", "text"),
        ("prepare raw/text.jsonl out --tokenizer bytes --column meta.sourse --workers 1", "meta.source"),
        ("prepare raw/text.jsonl out --tokenizer bytes --column mta.source --workers 1", "meta.source"),
        ("prepare chats.jsonl out --tokenizer bytes --chat-template t.jinja --column mesages --workers 1", "messages"),
        ("prepare table.csv out --tokenizer bytes --column txet", "text"),
        ("prepare raw/text.jsonl out --tokenizer tiktoken:cl100k", "cl100k_base"),
    ],
)
def test_a_mistyped_verb_path_or_column_is_guessed(
    line: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["penstock", *line.split()])
    try:
        code = main(line.split())
    except SystemExit as error:
        code = int(error.code or 0)
    assert code in (1, 2)
    assert re.search(rf"Did you mean '(/.*/)?{re.escape(meant)}'\?", capsys.readouterr().err)


def test_columns_of_a_dataset_are_guessed_in_python_too() -> None:
    with pytest.raises(penstock.errors.SchemaError, match=r"the columns are 'tokens'\. Did you mean 'tokens'\?"):
        penstock.open("corpus").select_columns(["token"])


def test_what_is_like_nothing_is_not_guessed(folder: Path) -> None:
    assert did_you_mean("zebra", ["text", "label"]) == ""
    assert similar_path(folder / "zebra") == similar_path("*.jsonl") == similar_path("corpus") == ""
    assert similar_path(folder / "train.py" / "inside") == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inspect table.csv", "a dataset is a folder, and this is a file"),
        ("prepare empty out", "empty: the folder has no files to read"),
        ("serve corpus", "corpus is a folder; a plan is a file with the text that plan.to_toml() gives"),
        ("bench corpus", "corpus is a folder; give a plan file (.toml), or a job"),
        ("top nowhere.invalid:1 --json", "nowhere.invalid:1: no name service knows an address for that"),
    ],
)
def test_a_thing_of_the_wrong_kind_is_called_what_it_is(
    folder: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    assert main(line.split()) in (1, 2)
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["inspect", "--json"],
            "the following arguments are required: DATASET|PLAN.toml\nTry `penstock inspect corpus`",
        ),
        (
            ["inspect", "--json", "data", "--sampels"],
            "unrecognized arguments: --sampels. Did you mean '--samples'?\nTry",
        ),
        (["trace", "data", "--json", "--step", "x"], "argument --step: invalid int value: 'x'\nTry"),
        (["inspct", "--json"], "Did you mean 'inspect'?"),
    ],
)
def test_wrong_usage_is_an_object_where_json_was_asked_for(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.err) == (2, "")
    assert said in json.loads(shown.out)["message"]


def test_words_for_the_doctors_script_do_not_ask_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--seconds", "x", "--", "train.py", "--json"])
    assert capsys.readouterr().out == ""


def test_json_may_come_before_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "verify", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "IncompleteDataset"
