"""`penstock trace` says which documents a batch was made of; `inspect` fits a screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli import main
from penstock.report import histogram

TEXTS = [f"Document {number} is about {'water ' * (number % 5 + 1)}." for number in range(30)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    penstock.prepare(folder / "text.jsonl", folder / "corpus", transform=penstock.Tokenize("bytes"), workers=1)
    return folder / "corpus"


def test_a_dataset_with_its_stages_is_traced_to_documents_files_and_text(corpus: Path, capsys) -> None:
    assert main(["trace", str(corpus), "--step", "1", "--seed", "7", "--pack", "64", "--batch", "4"]) == 0
    shown = capsys.readouterr().out
    plan = penstock.open(corpus).shuffle(seed=7).pack(64).batch(4)
    traces = plan.documents(1)
    assert shown.startswith(f"Step 1 of epoch 0: {len(traces)} documents")
    for trace in traces:
        assert f"document {trace.document:,} from token {trace.start:,}" in shown
        assert f"row {trace.document}" in trace.origin
        assert trace.origin in shown
    assert repr(" ".join(TEXTS[traces[0].document].split())[:20])[1:-1] in shown


def test_a_plan_file_is_traced_for_one_rank_and_row_as_json(corpus: Path, tmp_path: Path, capsys) -> None:
    plan = penstock.open(corpus).shuffle(seed=7).pack(64).batch(4)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    where = ["--step", "2", "--epoch", "1", "--rank", "1", "--world-size", "2", "--row", "0"]
    assert main(["trace", str(tmp_path / "plan.toml"), *where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = [each for each in plan.documents(2, 1, 1, 2) if each.row == 0]
    assert [(each["document"], each["column"], each["origin"]) for each in found] == [
        (each.document, each.column, each.origin) for each in expected
    ]
    assert found[0]["text"].startswith("Document ")


def test_long_lists_are_cut_with_a_count(corpus: Path, capsys) -> None:
    stages = ["--step", "0", "--batch", "25"]
    assert main(["trace", str(corpus), *stages]) == 0
    shown = capsys.readouterr().out
    assert shown.count("document ") == 20
    assert "… and 5 documents more; --full shows all" in shown
    assert main(["trace", str(corpus), *stages, "--full"]) == 0
    assert capsys.readouterr().out.count("document ") == 25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus", "--step", "0"], "is a dataset: say what a batch is, as in --seed 7 --pack 4096 --batch 32"),
        (["corpus", "--step", "99", "--batch", "4"], "Epoch 0 has steps 0 to 7"),
        (["plan.toml", "--step", "0", "--batch", "4"], "is a plan, with its own stages"),
        (["nowhere", "--step", "0", "--batch", "4"], "nowhere"),
    ],
)
def test_what_cannot_be_traced_is_told(corpus: Path, capsys, monkeypatch, arguments, message) -> None:
    monkeypatch.chdir(corpus.parent)
    Path("plan.toml").write_text(penstock.open(corpus).batch(4).to_toml())
    assert main(["trace", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(corpus: Path, tmp_path: Path, capsys) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    other.save(str(tmp_path / "other.json"))
    stages = ["--step", "0", "--pack", "64", "--batch", "2", "--decode", str(tmp_path / "other.json")]
    assert main(["trace", str(corpus), *stages]) == 1
    assert "is not the tokenizer that made these tokens: bytes" in capsys.readouterr().err


def test_inspect_fits_a_screen_and_full_shows_all(tmp_path: Path, capsys) -> None:
    columns = {f"column_{number}": "uint16[*]" for number in range(30)}
    attributes = {f"fact_{number}": number for number in range(30)}
    with penstock.DatasetWriter(tmp_path / "data", columns, attributes=attributes) as writer:
        for index in range(64):
            writer.write({name: range(index * index * index % 5000) for name in columns})
    assert main(["inspect", str(tmp_path / "data")]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 50
    for part in ("… and 22 more columns; --full shows all", "… and 22 more; --full", "Lengths of 29 more columns"):
        assert part in shown
    assert main(["inspect", str(tmp_path / "data"), "--full"]) == 0
    full = capsys.readouterr().out
    assert "more" not in full
    assert all(name in full for name in [*columns, *attributes])
    assert full.count("Lengths of") == 30


def test_inspect_shows_bytes_as_the_text_they_are(corpus: Path, capsys) -> None:
    assert main(["inspect", str(corpus)]) == 0
    shown = capsys.readouterr().out
    assert "Document 0 is about water" in shown
    assert "Sources: not checked; --sources says whether they have changed." in shown
    assert "tokenizer            bytes, 25" in shown
    assert "skipped              nothing" in shown
    assert "recipe" not in shown
    assert "Sample 1" not in shown


def test_joined_bins_count_what_they_join() -> None:
    import numpy as np

    lengths = histogram([np.array([1 << place for place in range(14)] + [200] * 50)])
    assert len(lengths.lines()) == 14
    cut = lengths.lines(5)
    assert len(cut) == 5
    assert sum(int(line[24:40].replace(",", "")) for line in cut) == 64
    assert any("128 to 255" in line and "51" in line for line in cut)


def test_a_mistyped_option_is_guessed(corpus: Path, capsys, monkeypatch) -> None:
    command = ["inspect", str(corpus), "--sampels=2"]
    monkeypatch.setattr(sys, "argv", ["penstock", *command])
    with pytest.raises(SystemExit) as exit_code:
        main(command)
    assert exit_code.value.code == 2
    assert "--sampels=2. Did you mean '--samples'?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["inspect", "trace"])
def test_a_step_that_is_not_there_and_a_batch_that_fits_nowhere_are_said_in_a_sentence(
    corpus: Path, tmp_path: Path, verb: str, capsys
) -> None:
    packed, path = penstock.open(corpus).shuffle(seed=7).pack(64), tmp_path / "plan.toml"
    for size, step, message in ((4, "99999", "step 99999 is asked for"), (1 << 40, "0", "out of memory: ")):
        path.write_text(packed.batch(size).to_toml())
        assert main([verb, str(path), "--step", step]) == 1
        assert message in capsys.readouterr().err


def test_samples_that_are_no_documents_are_not_called_so(tmp_path: Path, capsys) -> None:
    with penstock.DatasetWriter(tmp_path / "data", {"image": "uint8[2,2]"}) as writer:
        writer.write_batch({"image": [[[0, 1], [2, 3]]] * 30})
    assert main(["trace", str(tmp_path / "data"), "--step", "0", "--batch", "25"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Step 0 of epoch 0: 25 samples\n\nrow 0\n  sample 0\n")
    assert "… and 5 samples more" in shown
    assert "token" not in shown
