"""What `/proc` tells of processes, and what is said where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.machine import ProcessUsage, _usage, process_tree, read_process

_STAT = "{pid} ({name}) S {parent} 1 1 0 -1 4194304 11 0 3 0 150 50 0 0 20 0 1 0 {pid}77 9999 1000 0"


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child of its own, both of which wait."""
    code = "import subprocess, sys; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); c.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /proc: 10 has the children 20 and 30, and 20 has 40."""
    monkeypatch.setattr(_usage, "_PROC", str(tmp_path))
    for pid, parent in ((10, 1), (20, 10), (30, 10), (40, 20)):
        (tmp_path / str(pid) / "task" / str(pid)).mkdir(parents=True)
        (tmp_path / str(pid) / "stat").write_text(_STAT.format(pid=pid, parent=parent, name="a (strange) name"))
    return tmp_path


def pids(tree: tuple[ProcessUsage, ...]) -> list[int]:
    return [usage.pid for usage in tree]


def test_a_process_is_read_as_psutil_reads_it() -> None:
    usage = read_process(os.getpid(), with_pss=True)
    reference = psutil.Process()
    assert usage is not None
    assert usage.parent == reference.ppid()
    assert usage.cpu_seconds == pytest.approx(sum(reference.cpu_times()[:2]), abs=0.2)
    assert usage.rss_bytes == pytest.approx(reference.memory_info().rss, rel=0.05)
    assert usage.pss_bytes is not None
    assert 0 < usage.pss_bytes <= usage.rss_bytes * 1.05


def test_the_tree_holds_children_of_children(family: subprocess.Popen[bytes]) -> None:
    tree = process_tree(family.pid)
    assert [usage.parent for usage in tree] == [os.getpid(), family.pid]
    assert set(pids(tree)) < set(pids(process_tree(os.getpid())))


def test_a_process_that_is_gone_is_none_and_has_no_tree() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert read_process(process.pid) is None
    assert process_tree(process.pid) == ()


def test_what_may_not_be_read_is_none_and_the_rest_is_there(proc: Path) -> None:
    usage = read_process(20, with_pss=True)
    assert usage is not None
    assert usage.parent == 10
    assert usage.cpu_seconds == 200 / os.sysconf("SC_CLK_TCK")
    assert (usage.pss_bytes, usage.read_bytes) == (None, None)


def test_without_lists_of_children_parents_are_asked(proc: Path) -> None:
    assert sorted(pids(process_tree(10))) == [10, 20, 30, 40]
    assert pids(process_tree(30)) == [30]


def test_lists_of_children_are_used_where_there_are(proc: Path) -> None:
    for pid, children in ((10, "30 "), (20, ""), (30, ""), (40, "")):
        (proc / str(pid) / "task" / str(pid) / "children").write_text(children)
    assert pids(process_tree(10)) == [10, 30]


@pytest.mark.parametrize("damage", ["", "10 (x", "10 (x) S 1", "\0\0\0"])
def test_a_stat_that_cannot_be_read_is_none(proc: Path, damage: str) -> None:
    (proc / "10" / "stat").write_text(damage)
    assert read_process(10) is None


def test_without_proc_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_usage, "_PROC", str(tmp_path / "no"))
    assert process_tree(os.getpid()) == ()
