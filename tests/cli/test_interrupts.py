"""Ctrl-C, at any time: a word, an exit code, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED_AT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if {swallows}:  # as compiled modules do
                    raise ImportError(name) from None
                raise

sys.meta_path.insert(0, Interrupt())
from penstock.__main__ import run
run()
"""


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize(
    "module", ["penstock.cli", "penstock.cli._folders", "penstock.shards", "penstock.shards._folder"]
)
def test_an_interrupt_while_modules_are_imported_shows_no_traceback(
    module: str, swallows: bool, tmp_path: Path
) -> None:
    code = INTERRUPTED_AT.format(module=module, swallows=swallows)
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "penstock: interrupted\n")


def test_an_interrupt_is_told_as_json_where_that_was_asked_for(tmp_path: Path) -> None:
    code = INTERRUPTED_AT.format(module="penstock.shards", swallows=False)
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(tmp_path), "--json"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")
    assert json.loads(done.stdout) == {"error": "KeyboardInterrupt", "message": "interrupted"}


def test_a_job_that_ignores_interrupts_goes_on_ignoring_them() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + INTERRUPTED_AT.format(
        module="penstock.cli", swallows=False
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
