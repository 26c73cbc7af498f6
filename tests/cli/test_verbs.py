"""The command as people type it: what it prints, and the exit code it leaves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

import penstock
from penstock.cli import main
from penstock.cli._main import CONTENTS, VERBS


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with penstock.DatasetWriter(
        tmp_path / "data", {"tokens": "uint16[*]", "label": "int64", "name": "bytes"}, attributes={"licence": "CC0"}
    ) as writer:
        for index in range(20):
            writer.write({"tokens": range(index), "label": index, "name": f"document [{index}]".encode()})
    return tmp_path / "data"


def flip_a_bit(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_inspect_shows_columns_counts_attributes_lengths_and_samples(dataset, capsys):
    assert main(["inspect", str(dataset), "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "20 samples in 1 shard,",
        "uint16[*]",
        "licence              CC0",
        "Lengths of tokens: 0 to 19, mean 9.5",
    ):
        assert part in shown
    assert "b'document [1]'" in shown


def test_the_command_alone_shows_the_table_of_contents(capsys):
    assert main([]) == 2
    assert "penstock doctor" in capsys.readouterr().out


def test_wrong_usage_shows_what_a_verb_takes_and_an_example(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trace", "corpus"])
    told = capsys.readouterr().err
    assert told.startswith("usage: penstock trace [options] --step N DATASET_OR_PLAN\n")
    assert "required: --step\nTry `penstock trace plan.toml" in told


def test_inspect_shows_tokens_as_text(dataset, tmp_path, capsys):
    vocabulary = {chr(97 + number): number for number in range(20)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert main(["inspect", str(dataset), "--samples", "4", "--decode", str(tmp_path / "tokenizer.json")]) == 0
    assert "a b c (3 tokens)" in capsys.readouterr().out
    with penstock.DatasetWriter(tmp_path / "numbers", {"x": "int64"}):
        pass
    assert main(["inspect", str(tmp_path / "numbers"), "--decode", str(tmp_path / "tokenizer.json")]) != 0
    assert "no column of tokens to decode" in capsys.readouterr().err


def test_inspect_tells_how_a_dataset_was_made_in_a_few_words(tmp_path, capsys, inline):
    Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a")).save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_bytes(b"a a\na\xff\n")
    tokenize = penstock.Tokenize(str(tmp_path / "words.json"), append_eos="<eos>", keep=["path"])
    lines = penstock.SourceOptions(text_unit="line")
    options = {"workers": 1, "on_error": "skip", "pack": 8}
    penstock.prepare(str(tmp_path / "a.txt"), str(tmp_path / "made"), transform=tokenize, reading=lines, **options)
    assert main(["inspect", str(tmp_path / "made")]) == 0
    shown = capsys.readouterr().out
    assert f"From 1 file: {tmp_path}/a.txt" in shown
    assert "tokenizer            words.json, 2 tokens, <eos> (1) ends each document" in shown
    assert "transform            Tokenize, column text, keep path\n" in shown
    assert "skipped              1 row (invalid_utf8 1)" in shown
    assert "packing              rows are counted for tokens 8 split None" in shown
    assert "--decode TOKENIZER shows tokens as text; the tokenizer was words.json" in shown
    assert main(["inspect", str(tmp_path / "made"), "--decode", str(tmp_path / "words.json")]) == 0
    assert "--decode TOKENIZER" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "attribute", [None, 3, [], "x", {}, {"name": []}, {"files": {}, "patterns": 3}, {"rows": [], "indexes": 3}]
)
@pytest.mark.parametrize("key", ["tokenizer", "transform", "skipped", "preparation", "images", "packing"])
def test_inspect_shows_attributes_that_are_not_as_prepare_writes_them(tmp_path, key, attribute):
    with penstock.DatasetWriter(tmp_path / "data", {"x": "int64"}, attributes={key: attribute}) as writer:
        writer.write({"x": 1})
    assert main(["inspect", str(tmp_path / "data")]) == 0


def test_inspect_shows_bytes_of_a_plan_as_text_without_a_tokenizer(tmp_path, capsys, inline):
    (tmp_path / "a.txt").write_text("To be, or not to be")
    assert (
        main(["prepare", str(tmp_path / "a.txt"), str(tmp_path / "d"), "--tokenizer", "bytes", "--workers", "1"]) == 0
    )
    (tmp_path / "p.toml").write_text(penstock.open(tmp_path / "d").pack(32).batch(1).to_toml())
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "p.toml")]) == 0
    assert "To be, or not to be" in capsys.readouterr().out


def test_inspect_shows_a_batch_of_a_plan_as_text(dataset, tmp_path, capsys):
    vocabulary = {chr(97 + number): number for number in range(20)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    plan = tmp_path / "plan.toml"
    plan.write_text(penstock.open(dataset).pad(4).batch(2).to_toml())
    assert main(["inspect", str(plan), "--decode", str(tmp_path / "tokenizer.json"), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    assert ".pad(length=4)" in shown
    assert "step 1: 2 rows of 3 places" in shown
    assert "document 3: 3 tokens, 2 predicted\n  │ a b c" in shown
    assert "--full" not in shown
    assert main(["inspect", str(plan), "--json"]) == 0
    assert "│ 0" in json.loads(capsys.readouterr().out)["batch"]
    assert main(["inspect", str(plan), "--decode", str(plan)]) == 1
    assert "not a tokenizer.json" in capsys.readouterr().err


def test_inspect_shows_as_much_of_a_batch_as_fits_on_a_screen(tmp_path, capsys):
    with penstock.DatasetWriter(tmp_path / "data", {"tokens": "uint16[*]"}) as writer:
        writer.write_batch({"tokens": [range(300)] * 40})
    plan = tmp_path / "plan.toml"
    plan.write_text(penstock.open(tmp_path / "data").pad(400).batch(20).to_toml())
    assert main(["inspect", str(plan)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "… and 37 more lines; --full shows all"
    assert max(map(len, lines[1:])) < 170
    assert main(["inspect", str(plan), "--full"]) == 0
    assert "row 19\n" in capsys.readouterr().out


def test_inspect_says_when_tokens_were_made_with_another_tokenizer(tmp_path, capsys):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    facts = {"tokenizer": {"name": "theirs", "sha256": "0" * 64}}
    with penstock.DatasetWriter(tmp_path / "data", {"tokens": "uint16[*]"}, attributes=facts) as writer:
        writer.write({"tokens": [0, 0]})
    assert main(["inspect", str(tmp_path / "data"), "--decode", str(tmp_path / "tokenizer.json")]) == 0
    assert "[made with another tokenizer: theirs]" in capsys.readouterr().out


def test_inspect_tells_what_is_known_beside_the_data_in_words(tmp_path, capsys):
    known = {"tokenizer": {"name": "mine", "sha256": "0123456789abcdef" * 4, "size": 50257, "chat": None}, "empty": {}}
    with penstock.DatasetWriter(tmp_path / "data", {"x": "int64"}, attributes={**known, "list": [1, {"a": {"b": 2}}]}):
        pass
    assert main(["inspect", str(tmp_path / "data")]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert lines[1:] == [
        ["tokenizer", "name mine, sha256 0123456789ab…, size 50,257"],
        ["empty", "nothing"],
        ["list", "[1, a (b 2)]"],
    ]


def test_names_and_samples_are_shown_as_they_are(tmp_path, capsys):
    folder = tmp_path / "corpus[red]"
    with penstock.DatasetWriter(folder, {"text": "bytes"}) as writer:
        writer.write({"text": b"[bold]:smile:[/bold]"})
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"{folder}   fingerprint" in shown
    assert "b'[bold]:smile:[/bold]'" in shown
    assert main(["verify", str(folder)]) == 0
    assert f"{folder}: sound." in capsys.readouterr().out


def test_an_error_of_the_system_names_the_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(
        os, "scandir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied", path))
    )
    assert main(["prepare", str(tmp_path / "folder"), str(tmp_path / "data")]) == 1
    assert capsys.readouterr().err == f"penstock: {tmp_path}/folder: Permission denied\n"


def test_a_terminal_with_few_letters_shows_the_others_by_their_numbers(tmp_path):
    with penstock.DatasetWriter(tmp_path / "naïve…", {"tokens": "uint16[*]"}) as writer:
        writer.write({"tokens": [1, 2]})
    command = [sys.executable, "-m", "penstock.cli", "inspect", str(tmp_path / "naïve…")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert "na\\xefve\\u2026" in shown
    assert "Sample 0" in shown


def test_inspect_as_json_is_one_object_with_the_same_facts(dataset, capsys):
    assert main(["inspect", str(dataset), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 20
    assert found["columns"] == {"tokens": "uint16[*]", "label": "int64", "name": "bytes"}
    assert found["fingerprint"] == penstock.open(dataset).storage.fingerprint
    assert sum(part["count"] for part in found["lengths"]["tokens"]["bins"]) == 20
    assert len(found["first_samples"]) == 3


def test_inspect_of_an_empty_dataset_works(tmp_path, capsys):
    with penstock.DatasetWriter(tmp_path / "empty", {"tokens": "uint16[*]"}):
        pass
    assert main(["inspect", str(tmp_path / "empty")]) == 0
    assert "0 samples in 0 shards" in capsys.readouterr().out


def test_verify_of_a_sound_dataset_exits_0_and_says_so(dataset, capsys):
    assert main(["verify", str(dataset)]) == 0
    assert "sound. 20 samples in 1 shard," in capsys.readouterr().out


def test_verify_of_a_damaged_dataset_exits_1_and_names_file_and_block(dataset, capsys):
    shard = next(dataset.glob("shard-*"))
    flip_a_bit(shard, shard.stat().st_size - 1)
    assert main(["verify", str(dataset)]) == 1
    shown = capsys.readouterr().out
    assert str(shard) in shown
    assert "block 0 of tensor 'name.values'" in shown
    assert main(["verify", str(dataset), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["is_sound"] is False


def test_a_failure_is_one_line_on_standard_error_and_exit_code_1(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("penstock: ")
    assert "the folder does not exist" in captured.err


@pytest.mark.parametrize("line", ["tune nowhere.py --json", "bench nowhere.py --json", "doctor --json -- nowhere.py"])
def test_a_file_that_is_not_there_is_json_for_machines_as_well(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "FileNotFoundError"


def test_a_failure_as_json_names_the_error(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "nowhere"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "IncompleteDataset"


def test_a_mistyped_verb_exits_2_and_is_guessed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["penstock", "verfy"])
    with pytest.raises(SystemExit) as exit_:
        main(["verfy"])
    assert exit_.value.code == 2
    assert "Did you mean 'verify'?" in capsys.readouterr().err


def test_help_lists_every_verb_with_an_example_under_a_heading(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for heading, verbs in CONTENTS.items():
        assert f"\n{heading}:\n" in shown
        assert all(verb.help in shown and f"$ {verb.example}" in shown for verb in verbs)


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_the_example_of_a_verb_is_a_command_line_that_it_takes(verb, capsys, monkeypatch):
    monkeypatch.setattr(f"penstock.cli.{verb.module}.run_{verb.name}", lambda arguments: 0)
    command, name, *arguments = shlex.split(verb.example.removeprefix('eval "$(').removesuffix(')"'))
    assert (command, name) == ("penstock", verb.name)
    assert main([name, *arguments]) == 0
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"example:\n  {verb.example}" in capsys.readouterr().out


def test_help_imports_no_verb_and_nothing_heavy(tmp_path):
    code = "import sys; from penstock.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    heavy = ("numpy", "rich", "torch", "penstock.report", "penstock.cli._prepare")
    code += f"print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_error(dataset):
    command = f"{sys.executable} -m penstock.cli inspect {dataset} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
