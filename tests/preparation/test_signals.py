"""Signals at the moments at which names of files change: what was prepared is found again, and no byte is different."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .corpora import contents, make_corpus

SIGNALLED = """
import json, os, signal, sys

number, at, renames = int(sys.argv[1]), int(sys.argv[2]), 0

def count(event, arguments):
    global renames
    if event == "os.rename":
        renames += 1
        if renames == at:
            os.kill(os.getpid(), number)

sys.addaudithook(count)
from penstock.__main__ import run
sys.argv = ["penstock", "prepare", *sys.argv[3:]]
try:
    run()
finally:
    print(json.dumps(renames), file=sys.stderr)
"""


def prepare(source: Path, folder: Path, *, number: int = 0, at: int = 0) -> subprocess.CompletedProcess[str]:
    words = [f"{source}/*.jsonl", str(folder), "--tokenizer", "bytes", "--workers", "1", "--shard-bytes", "20000"]
    command = [sys.executable, "-c", SIGNALLED, str(number), str(at), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], int]:
    """(sources, what comes of them, how often the command renames a file)"""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder, num_files=3, num_rows=100)
    done = prepare(folder, folder / "data")
    assert done.returncode == 0, done.stderr
    return folder, contents(folder / "data"), json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("share", [0.0, *(pytest.param(each, marks=pytest.mark.stress) for each in (0.4, 0.8)), 1.0])
def test_a_signal_while_files_get_their_names_changes_no_byte(
    number: signal.Signals, share: float, undisturbed: tuple[Path, dict[str, str], int], tmp_path: Path
) -> None:
    source, expected, num_renames = undisturbed
    stopped = prepare(source, tmp_path / "data", number=number, at=max(1, round(share * num_renames)))
    assert stopped.returncode == (130 if number == signal.SIGINT else -number), stopped.stderr
    assert "Traceback" not in stopped.stderr
    again = prepare(source, tmp_path / "data")  # also after the last rename, to clear up
    assert again.returncode == 0, again.stdout + again.stderr
    assert contents(tmp_path / "data") == expected
