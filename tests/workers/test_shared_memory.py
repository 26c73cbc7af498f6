"""Memory that processes share, with and without the system call for it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from confined import run_confined, without_memory_files
from penstock.workers import _channel, create_shared_memory, grow_shared_memory


@pytest.fixture
def no_memory_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a container that forbids them; the folder stands for /dev/shm."""

    def refuse(name: str) -> int:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(_channel, "_create_memory_file", refuse)
    monkeypatch.setattr(_channel, "_FOLDER", str(tmp_path))
    return tmp_path


def check_memory(descriptor: int) -> None:
    grow_shared_memory(descriptor, 10_000)
    with mmap.mmap(descriptor, 10_000) as one, mmap.mmap(descriptor, 10_000) as other:
        one[9_999] = 7
        assert other[9_999] == 7
    assert not os.get_inheritable(descriptor)
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)


def test_memory_grows_and_is_seen_by_all_who_map_it() -> None:
    check_memory(create_shared_memory("penstock-test", 100))


def test_a_python_that_was_built_without_memory_files_asks_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "MFD_CLOEXEC")
    descriptor = create_shared_memory("penstock-test", 100)
    assert "memfd:penstock-test" in os.readlink(f"/proc/self/fd/{descriptor}")
    check_memory(descriptor)


def test_where_memory_files_are_forbidden_it_is_a_file_that_never_has_a_name(no_memory_files: Path) -> None:
    descriptor = create_shared_memory("penstock-test", 100)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(no_memory_files))
    assert list(no_memory_files.iterdir()) == []
    check_memory(descriptor)


def test_where_nothing_works_the_error_says_why_and_what_to_do(
    no_memory_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_channel, "_FOLDER", "/nowhere")
    monkeypatch.setenv("TMPDIR", str(no_memory_files / "neither"))
    with pytest.raises(PermissionError) as caught:
        create_shared_memory("penstock-test", 100)
    (note,) = caught.value.__notes__
    assert "/nowhere: No such file" in note
    assert "num_workers=0" in note
    assert "ulimit" not in note


FILL = """
import os
from penstock.workers import create_shared_memory, grow_shared_memory
memory = create_shared_memory("penstock-test", 4096)
print(os.fstatvfs(memory).f_blocks * os.fstatvfs(memory).f_frsize)
try:
    grow_shared_memory(memory, 10_000_000)
except OSError as error:
    print(os.strerror(error.errno), *error.__notes__)
"""


def test_a_small_file_system_is_avoided_and_a_full_one_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    ways = [without_memory_files(errno.ENOSYS), "/dev/shm=65536"]
    elsewhere = run_confined(ways, ["-c", FILL], TMPDIR=str(tmp_path))
    assert (elsewhere.returncode, elsewhere.stderr) == (0, "")
    assert int(elsewhere.stdout) > 65536
    full = run_confined(ways, ["-c", FILL], TMPDIR="/dev/shm")
    assert (full.returncode, full.stderr) == (0, "")
    size, told = full.stdout.splitlines()
    assert size == "65536"
    assert told.startswith("No space left on device Memory files (memfd_create) are forbidden here")
    assert "--shm-size" in told
