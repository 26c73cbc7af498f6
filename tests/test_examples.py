"""The examples run as they are written, are short, and are listed; started again, those that say so go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import s3lite

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def run(script: str, *arguments: object, num_ranks: int = 0) -> str:
    port = str(29500 + os.getpid() % 2000)
    launch = (
        ["-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}", "--master_port", port] if num_ranks else []
    )
    done = subprocess.run(
        [sys.executable, *launch, EXAMPLES / script, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_short_and_listed(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) < 120
    assert script in (EXAMPLES / "README.md").read_text()


def test_the_list_names_files_that_exist() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text())
    assert [name for name in linked if not (EXAMPLES / name).exists()] == []


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_a_stream_of_a_table_is_trained_on_and_resumed(tmp_path: Path) -> None:
    assert "step 20: loss" in run("csv_stream.py", tmp_path, "--steps", 20)
    assert "going on at step 20" in run("csv_stream.py", tmp_path, "--steps", 40)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_a_bucket_is_prepared_into_and_trained_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3lite.serve(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        assert "step 20: loss" in run("object_store.py", tmp_path / "run", "s3://bucket/corpus", "--steps", 20)
        assert "going on at step 20" in run("object_store.py", tmp_path / "run", "s3://bucket/corpus", "--steps", 30)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_examples_on_text_run_and_go_on(tmp_path: Path) -> None:
    run("gpt_pretraining.py", tmp_path, "--steps", 10)
    assert "going on at step 10" in run("gpt_pretraining.py", tmp_path, "--steps", 20)
    assert "eval_loss" in run("hf_trainer.py", tmp_path, "--steps", 10)
    assert "10 steps, loss" in run("lightning_fit.py", tmp_path, "--steps", 10)
    run("accelerate_loop.py", tmp_path, "--steps", 10)
    assert "going on at step 10" in run("accelerate_loop.py", tmp_path, "--steps", 20)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_examples_on_conversations_and_images_run(tmp_path: Path) -> None:
    assert "validation loss" in run("sft_chat.py", tmp_path / "chat", "--steps", 5)
    assert "eval_loss" in run("trl_sft.py", tmp_path / "chat", "--steps", 5)
    assert "step 4: loss" in run("pictures_and_text.py", tmp_path / "pictures", "--steps", 5)
    assert "images of the test split are right" in run("image_folder.py", tmp_path / "images", "--epochs", 1)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_examples_on_two_processes_go_on_with_one(tmp_path: Path) -> None:
    steps = {"ddp_resume.py": (5, 10), "distributed_checkpoint.py": (5, 10)}
    for script, (first, second) in steps.items():
        run(script, tmp_path, "--steps", first, num_ranks=2)
        assert f"step {second - 1 if script == 'ddp_resume.py' else second}" in run(
            script, tmp_path, "--steps", second, num_ranks=1
        )
    assert "eval_loss" in run("hf_trainer.py", tmp_path / "trainer", "--steps", 4, num_ranks=2)
