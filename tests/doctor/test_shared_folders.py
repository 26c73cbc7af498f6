"""On a machine shared with a hostile user: names that they planted lead nowhere, and they read nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .scripts import ENVIRONMENT, doctor

LOOKS = """
import json, os, stat
folder = os.environ["PENSTOCK_DOCTOR"]
names = [folder, *(os.path.join(folder, name) for name in os.listdir(folder))]
print(json.dumps([stat.S_IMODE(os.lstat(name).st_mode) for name in names]), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")
def test_the_doctor_leaves_what_is_planted_alone_and_shows_nothing(tmp_path: Path) -> None:
    shared, precious, script = tmp_path / "shared", tmp_path / "precious", tmp_path / "train.py"
    shared.mkdir()
    shared.chmod(0o1777)
    precious.write_text("precious")
    script.write_text(LOOKS)
    for name in (
        "report.html",
        "trace.json",
        "penstock-doctor-",
        "penstock-doctor-aaaaaaaa",
        "facts.jsonl",
        "settings.json",
    ):
        (shared / name).symlink_to(precious)
        os.lchown(shared / name, 65534, 65534)
    pages = ("--html", str(shared / "report.html"), "--perfetto", str(shared / "trace.json"))
    done = doctor(str(script), options=pages, cwd=shared, env=ENVIRONMENT | {"TMPDIR": str(shared)})
    assert done.returncode == 0, done.stderr
    folder, *files = json.loads(done.stdout.splitlines()[0])
    assert folder == 0o700
    assert files
    assert precious.read_text() == "precious"
    assert (shared / "report.html").read_text().startswith("<!doctype html>")
    left = [path.name for path in shared.iterdir() if not path.is_symlink()]
    assert sorted(left) == ["report.html", "trace.json"]
