"""Running small scripts under the doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SRC = Path(__file__).parents[2] / "src"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{SRC}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def doctor(*words: str, options: tuple[str, ...] = (), cwd: Path | None = None, **more: Any) -> Any:
    """`penstock doctor` as users run it."""
    command = [sys.executable, "-m", "penstock.cli", "doctor", *options, "--", *words]
    environment = more.pop("env", ENVIRONMENT)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **more)


def diagnose(*words: str, options: tuple[str, ...] = (), cwd: Path | None = None, **more: Any) -> dict[str, Any]:
    """What `penstock doctor --json` says; a script's own output goes to standard error."""
    done = doctor(*words, options=("--json", *options), cwd=cwd, **more)
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"exit_code": done.returncode, "stderr": done.stderr}
