"""`penstock prepare`: flags to settings, words and JSON out, exit codes 0, 1 and 2."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import penstock
from penstock.cli import main

from .corpora import assert_holds, decoded, make_corpus, write_jsonl


def test_the_usual_call_says_what_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker_processes: None
) -> None:
    texts = make_corpus(tmp_path / "src", 2, 40)
    code = main(
        ["prepare", f"{tmp_path}/src/*.jsonl", str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "1"]
    )
    assert code == 0
    out = capsys.readouterr().out
    assert f"{len(texts)} samples, " in out
    assert "workers: read" in out
    assert "start-up" in out
    assert_holds(tmp_path / "data", texts)


def test_json_lines_tell_progress_and_end_with_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", 30, 1)
    arguments = ["--tokenizer", "bytes", "--append-eos", "<|eos|>", "--pack", "128", "--shuffle", "1", "--workers", "1"]
    assert main(["prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "data"), *arguments, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["progress"]["stage"] for line in lines[:-1]} == {"deal", "gather"}
    assert lines[-1]["num_samples"] == 30
    assert lines[-1]["bottleneck"] in ("read", "transform", "write")
    assert "packing" in penstock.shards.read_manifest(tmp_path / "data").attributes


@pytest.mark.parametrize(
    ("flags", "columns"),
    [
        (["--image-size", "20x30"], {"image": "uint8[20,30,3]", "label": "int64"}),
        (["--image-size", "16", "--image-mode", "crop", "--image-store", "jpeg"], {"image": "bytes", "label": "int64"}),
        (["--image-store", "as_is", "--keep", "class"], {"image": "bytes", "class": "bytes"}),
    ],
)
def test_images_are_decoded_as_flags_say(tmp_path: Path, flags: list[str], columns: dict[str, str]) -> None:
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "src" / name).mkdir(parents=True)
        pixels = np.full((40, 50, 3), 50 * number, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "src" / name / "0.jpg")
    assert main(["prepare", str(tmp_path / "src"), str(tmp_path / "data"), "--workers", "1", *flags]) == 0
    ds = penstock.open(tmp_path / "data")
    assert (len(ds), ds.schema.to_json()) == (2, columns)


def test_images_may_be_in_any_column(tmp_path: Path) -> None:
    encoded = io.BytesIO()
    Image.new("RGB", (9, 7)).save(encoded, "png")
    pq.write_table(pa.table({"photo": [encoded.getvalue()], "n": [3]}), tmp_path / "a.parquet")
    flags = ["--image-size", "8", "--column", "photo", "--keep", "n", "--workers", "1"]
    assert main(["prepare", str(tmp_path / "a.parquet"), str(tmp_path / "data"), *flags]) == 0
    assert penstock.open(tmp_path / "data").schema.to_json() == {"photo": "uint8[8,8,3]", "n": "int64"}


@pytest.mark.parametrize(("flag", "delimiter"), [(";", ";"), ("\\t", "\t"), ("tab", "\t")])
def test_csv_files_are_read_as_flags_say(tmp_path: Path, flag: str, delimiter: str) -> None:
    (tmp_path / "a.csv").write_text(f"n{delimiter}text\n1{delimiter}café, au lait\n", "latin-1")
    flags = ["--tokenizer", "bytes", "--delimiter", flag, "--encoding", "latin-1", "--workers", "1"]
    assert main(["prepare", str(tmp_path / "a.csv"), str(tmp_path / "data"), *flags]) == 0
    assert decoded(tmp_path / "data") == ["café, au lait"]


@pytest.mark.parametrize(
    ("flags", "columns"),
    [
        (["--no-header"], {"f0": "bytes", "f1": "bytes", "f2": "bytes"}),
        (["--names", "id,score,text", "--types", "infer"], {"id": "int64", "score": "float64", "text": "bytes"}),
        (
            ["--names", "a,b,c", "--types", "b=float32", "--missing", "nan"],
            {"a": "bytes", "b": "float32", "c": "bytes"},
        ),
        (["--no-header", "--types", "f0=int8", "--null-values", "NA,-"], {"f0": "int8", "f1": "bytes", "f2": "bytes"}),
    ],
)
def test_flags_say_what_a_csv_file_does_not(tmp_path: Path, flags: list[str], columns: dict[str, str]) -> None:
    (tmp_path / "a.csv").write_text("1,0.5,one\n2,1.5,two\n")
    assert main(["prepare", str(tmp_path / "a.csv"), str(tmp_path / "data"), "--workers", "1"]) == 1
    assert main(["prepare", str(tmp_path / "a.csv"), str(tmp_path / "data"), "--workers", "1", *flags]) == 0
    ds = penstock.open(tmp_path / "data")
    assert (len(ds), ds.schema.to_json()) == (2, columns)


def test_a_function_may_be_in_a_file_right_here(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    (tmp_path / "right_here.py").write_text("def ids(batch): return {'id': batch['id']}")
    command = [sys.executable, "-P", "-m", "penstock.cli", "prepare", "a.jsonl", "data", "--workers", "1", "--function"]
    done = subprocess.run([*command, "right_here:ids"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [sample["id"] for sample in penstock.open(tmp_path / "data")] == list(range(5))
    done = subprocess.run([*command, "not_here:ids"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No module 'not_here' for the function 'not_here:ids'" in done.stderr


UNGUARDED = """
import penstock

def ids(batch):
    return {"id": batch["id"]}

penstock.prepare("a.jsonl", "data", transform=ids, workers=1)
"""


def test_a_script_that_prepares_as_soon_as_it_is_imported_is_told_to_guard_itself(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.rpartition("ScriptError: ")[2]
    assert last.startswith("script.py, line 7, starts worker processes whenever the script is imported")
    assert "Put what the script does under `if __name__ == '__main__':`" in last
    assert len(done.stderr.splitlines()) < 12


def test_an_error_of_a_script_while_a_worker_imports_it_is_told_with_the_way_out(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    (tmp_path / "script.py").write_text(UNGUARDED.replace("penstock.prepare", "if ids: penstock.prepare"))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    last = done.stderr.rpartition("RuntimeError: ")[2]
    assert last.startswith("A worker imports this script to find one of its functions, and that ended with WriterBusy")
    assert "\nPut what the script does under `if __name__ == '__main__':`" in last


def test_skipped_rows_are_shown_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("{broken\n")
    command = ["prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "data"), "--tokenizer", "bytes", "--workers", "1"]
    assert main(command) == 1
    assert "row 5" in capsys.readouterr().err
    assert main([*command, "--on-error", "skip", "--max-skipped", "1"]) == 0
    assert "skipped 1 row: bad_json" in capsys.readouterr().out


def test_an_error_is_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(tmp_path / "*.jsonl"), str(tmp_path / "data"), "--json"]) == 1
    assert "message" in json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--append-eos", "x"], "--append-eos needs --tokenizer"),
        (["--column", "x"], "--column needs --tokenizer, --image-size or --index"),
        (["--function", "a:b", "--keep", "x"], "--keep does not go with --function"),
        (["--max-skipped", "3"], "--max-skipped needs --on-error skip"),
        (["--address", "here:1"], "--address needs --engine ray"),
        (["--separator", "x"], "--text-unit separator and --separator go together"),
        (["--tokenizer", "bytes", "--function", "a:b"], "--tokenizer and --function are 2 transforms"),
        (["--tokenizer", "bytes", "--image-mode", "keep"], "--tokenizer and --image-mode are 2 transforms"),
        (["--image-mode", "crop"], "--image-mode crop needs --image-size"),
        (["--image-size", "8", "--image-mode", "keep"], "--image-size changes images"),
        (["--image-size", "8", "--image-store", "as_is"], "--image-size changes images"),
    ],
)
def test_flags_that_do_not_go_together_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["prepare", "a", str(tmp_path / "data"), *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--workers", "0"], ["--shard-bytes", "big"], ["--shard-bytes", "0MB"], ["--image-size", "9x"]]
)
def test_values_that_are_none_are_wrong_usage(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "a", str(tmp_path / "data"), *flags])
    assert stopped.value.code == 2


def test_inspect_tells_when_sources_have_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", 5, 1)
    source, destination = f"{tmp_path}/*.jsonl", str(tmp_path / "data")
    assert main(["prepare", source, destination, "--tokenizer", "bytes", "--workers", "1"]) == 0
    capsys.readouterr()
    assert main(["inspect", destination, "--sources"]) == 0
    assert "Sources: up to date" in capsys.readouterr().out
    write_jsonl(tmp_path / "b.jsonl", 5, 2)
    assert main(["inspect", destination, "--json", "--sources"]) == 0
    assert "1 source file new" in json.loads(capsys.readouterr().out)["staleness"]
