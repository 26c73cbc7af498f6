"""A directory has one writer at a time, and a dead one holds nothing."""

import errno
import fcntl
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import StorageError, WriterBusy
from penstock.filesystem import DirectoryLock, lock_holder

from .children import Child, is_killed, run_in_child


def hold(directory: Path, ready: int) -> None:
    with DirectoryLock(directory):
        os.write(ready, b"x")
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """A child that holds the lock of `tmp_path`."""
    reader, writer = os.pipe()
    with Child(lambda: hold(tmp_path, writer)) as child:
        os.read(reader, 1)
        yield child
    os.close(reader)
    os.close(writer)


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_second_holder_in_another_process_fails_at_once_and_learns_who_is_first(tmp_path, holder, monkeypatch):
    begin = time.monotonic()
    with pytest.raises(WriterBusy) as caught:
        DirectoryLock(tmp_path).acquire()
    assert time.monotonic() - begin < 20
    message = str(caught.value)
    assert str(tmp_path) in message
    assert f"process {holder.pid} on {socket.gethostname()}" in message
    assert os.path.basename(sys.argv[0]) in message


def test_a_second_holder_in_the_same_process_fails_at_once(tmp_path):
    with DirectoryLock(tmp_path), pytest.raises(WriterBusy, match=f"process {os.getpid()} on "):
        DirectoryLock(tmp_path).acquire()


def test_the_refused_one_disturbs_neither_the_lock_nor_its_signature(tmp_path, holder):
    before = count_descriptors()
    for _ in range(3):
        with pytest.raises(WriterBusy):
            DirectoryLock(tmp_path).acquire()
    assert f"process {holder.pid} " in str(lock_holder(tmp_path))
    assert count_descriptors() == before


def test_a_killed_holder_holds_nothing(tmp_path, holder):
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert (tmp_path / ".lock").exists()
    with DirectoryLock(tmp_path):
        assert f"process {os.getpid()} " in str(lock_holder(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_killed_holder_holds_nothing_while_its_forked_children_live(tmp_path):
    reader, writer = os.pipe()

    def lock_and_fork() -> None:
        with DirectoryLock(tmp_path):
            if os.fork() == 0:
                os.write(writer, f"{os.getpid()}\n".encode())
                time.sleep(60)
                os._exit(0)
            time.sleep(60)

    with Child(lock_and_fork) as child:
        grandchild = int(os.read(reader, 100))
        with pytest.raises(WriterBusy):
            DirectoryLock(tmp_path).acquire()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        try:
            with DirectoryLock(tmp_path):
                pass
        finally:
            os.kill(grandchild, 9)
    os.close(reader)
    os.close(writer)


def test_a_forked_copy_neither_holds_the_lock_nor_gives_it_back(tmp_path):
    with DirectoryLock(tmp_path) as lock:

        def release_the_copy() -> bool:
            was_held = lock.is_held
            lock.release()
            return was_held

        assert run_in_child(release_the_copy) is False
        assert lock.is_held
        with pytest.raises(WriterBusy):
            DirectoryLock(tmp_path).acquire()


def test_releasing_removes_the_file_and_may_be_done_twice(tmp_path):
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()
    lock.release()
    assert os.listdir(tmp_path) == []
    assert lock_holder(tmp_path) is None


def test_a_lock_that_is_forgotten_is_given_back(tmp_path):
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    del lock
    with DirectoryLock(tmp_path):
        pass


def contend(directory: Path, seconds: float) -> tuple[int, int]:
    """(times inside, times not alone inside) of one contender."""
    inside = alone_violated = 0
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        try:
            with DirectoryLock(directory):
                inside += 1
                try:
                    os.mkdir(directory / "inside")  # fails when another is inside
                    os.rmdir(directory / "inside")
                except OSError:
                    alone_violated += 1
        except WriterBusy:
            pass
    return inside, alone_violated


@pytest.mark.parametrize("seconds", [2, pytest.param(30, marks=pytest.mark.stress)])
def test_among_many_that_take_and_release_it_never_two_are_inside(tmp_path, seconds):
    children = [Child(lambda: contend(tmp_path, seconds)) for _ in range(6)]
    results = [child.result() for child in children]
    assert sum(inside for inside, _ in results) > 100
    assert sum(violated for _, violated in results) == 0
    assert os.listdir(tmp_path) == []


def test_a_lock_file_swapped_while_it_is_taken_is_not_the_lock(tmp_path, monkeypatch):
    first = DirectoryLock(tmp_path)
    first.acquire()
    real = fcntl.flock

    def first_leaves_and_third_enters(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", real)
        first.release()
        third.acquire()
        real(descriptor, operation)

    third = DirectoryLock(tmp_path)
    monkeypatch.setattr(fcntl, "flock", first_leaves_and_third_enters)
    with pytest.raises(WriterBusy):
        DirectoryLock(tmp_path).acquire()
    third.release()
    assert os.listdir(tmp_path) == []


def test_a_missing_directory_is_an_error_that_names_it(tmp_path):
    with pytest.raises(StorageError, match=r"gone/\.lock: No such file or directory"):
        DirectoryLock(tmp_path / "gone").acquire()


@pytest.mark.parametrize("call", ["flock", "ftruncate", "pwrite"])
def test_a_file_system_that_refuses_gives_a_named_error_and_keeps_no_lock(tmp_path, monkeypatch, call):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = count_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl if call == "flock" else os, call, refuse)
        with pytest.raises(StorageError, match=r"\.lock: No locks available"):
            DirectoryLock(tmp_path).acquire()
    assert count_descriptors() == before
    with DirectoryLock(tmp_path):
        pass


def test_a_name_that_cannot_be_unlinked_does_not_keep_the_lock(tmp_path, monkeypatch):
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
        lock.release()
    with DirectoryLock(tmp_path):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become two users")
def test_one_of_a_group_goes_on_where_another_was_killed(tmp_path):
    group, first, second = 4000, 4001, 4002
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 0, group)
    shared.chmod(0o2775)

    def become(user):
        os.chdir(shared)  # while the way to it is open
        os.umask(0o002)
        os.setgroups([])
        os.setregid(group, group)
        os.setreuid(user, user)

    def be_killed():
        become(first)
        DirectoryLock(Path()).acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on():
        become(second)
        with DirectoryLock(Path()):
            return True

    assert is_killed(be_killed)
    assert run_in_child(go_on)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".lock").symlink_to("victim")
    with pytest.raises(StorageError, match=r"\.lock"):
        DirectoryLock(tmp_path).acquire()
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("signature", ["", "{", "[]", '{"pid": 1}', "\x00" * 10, "[" * 4000, '"' + "x" * 10_000])
def test_a_signature_that_says_nothing_is_nobody(tmp_path, signature):
    (tmp_path / ".lock").write_text(signature)
    assert lock_holder(tmp_path) is None


def test_asking_who_holds_a_lock_never_waits(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    begin = time.monotonic()
    assert run_in_child(lambda: lock_holder(tmp_path)) is None
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_ways_out_and_nothing_is_left(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        StorageError, match=r"\.lock: .* \(locked\)\. This file system does not support locks.*local disk"
    ):
        DirectoryLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_was_there_stays_when_locks_are_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / ".lock").write_text("another's")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError):
        DirectoryLock(tmp_path).acquire()
    assert (tmp_path / ".lock").read_text() == "another's"
