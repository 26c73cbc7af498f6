"""Files appear whole and synced, or not at all, and a refusal names path, progress and next step."""

import errno
import os
import resource
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.filesystem import (
    create_file,
    make_directory,
    put_in_place,
    remove_if_present,
    remove_tree,
    rename,
    storage_errors,
    sync_directory,
)

from .children import run_in_child


def refuse(number):
    def call(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    return call


def test_a_created_file_holds_the_chunks_in_order_and_its_size_comes_back(tmp_path):
    path = tmp_path / "file"
    assert create_file(path, [b"one", memoryview(b"two"), b"", b"3"]) == 7
    assert path.read_bytes() == b"onetwo3"


def test_a_page_is_put_in_place_through_no_link_that_others_laid(tmp_path):
    precious, page = tmp_path / "precious", tmp_path / "page.html"
    precious.write_text("precious")
    for name in ("page.html", f"page.html.{os.getpid()}", "page.html.tmp"):
        (tmp_path / name).symlink_to(precious)
        if os.geteuid() == 0:
            os.lchown(tmp_path / name, 65534, 65534)
    if os.geteuid() != 0:
        pytest.skip("only root can give a link to somebody else")
    before = set(tmp_path.iterdir())
    put_in_place(page, "new")
    assert (precious.read_text(), page.read_text()) == ("precious", "new")
    assert not page.is_symlink()
    assert set(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a pipe to somebody else")
def test_a_page_is_not_written_into_a_pipe_that_others_laid(tmp_path):
    page = tmp_path / "page.html"
    os.mkfifo(page, 0o666)
    os.chown(page, 65534, 65534)
    listening = os.open(page, os.O_RDWR | os.O_NONBLOCK)
    put_in_place(page, "secret")
    with pytest.raises(BlockingIOError):
        os.read(listening, 10)
    os.close(listening)
    assert page.read_text() == "secret"


def test_a_page_replaces_a_file_that_somebody_may_hold_open_or_have_linked(tmp_path):
    page, other = tmp_path / "page.html", tmp_path / "other"
    page.write_text("old")
    other.hardlink_to(page)
    with open(page) as held:
        put_in_place(page, "new")
        assert (held.read(), other.read_text(), page.read_text()) == ("old", "old", "new")


def test_a_page_goes_through_links_of_ones_own_and_to_devices(tmp_path):
    page, latest = tmp_path / "page.html", tmp_path / "latest.html"
    latest.symlink_to(page)
    put_in_place(latest, "new")
    assert latest.is_symlink()
    assert page.read_text() == "new"
    put_in_place(Path("/dev/null"), "new")
    with pytest.raises(FileNotFoundError, match=r"missing/page\.html'"):
        put_in_place(tmp_path / "missing" / "page.html", "new")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_umask_says_who_else_may_read_and_write(tmp_path, umask, mode):
    def create():
        os.umask(umask)
        create_file(tmp_path / "file", [b"x"])

    run_in_child(create)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_file_is_synced_after_its_last_byte(tmp_path, monkeypatch):
    calls = []
    for name in ("write", "fsync", "close"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    create_file(tmp_path / "file", [b"one", b"two"])
    assert calls == ["write", "write", "fsync", "close"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    assert create_file(tmp_path / "file", [bytes(range(200))]) == 200
    assert (tmp_path / "file").read_bytes() == bytes(range(200))


def test_a_file_that_was_there_is_neither_written_nor_removed(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StorageError, match="file: File exists"):
        create_file(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_refused_write_or_sync_leaves_nothing_and_no_descriptor(tmp_path, monkeypatch, call):
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse(errno.EIO))
        with pytest.raises(StorageError, match=r"file: Input/output error \(wrote \d of 3 bytes\)") as caught:
            create_file(tmp_path / "file", [b"one"])
    assert caught.value.errno == errno.EIO
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_is_named_with_the_bytes_written_needed_and_free(tmp_path, monkeypatch):
    real = os.write
    writes = iter([lambda descriptor, data: real(descriptor, data[:2]), refuse(errno.ENOSPC)])
    monkeypatch.setattr(os, "write", lambda *args: next(writes)(*args))
    pattern = r"file: No space left on device \(wrote 2 of 3 bytes\)\. [\d,]+ bytes are free there; make room"
    with pytest.raises(StorageError, match=pattern):
        create_file(tmp_path / "file", [b"one"])


def test_a_limit_on_file_size_is_an_error_with_the_way_out(tmp_path):
    def write_past_the_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        create_file(tmp_path / "file", [bytes(3000)])

    with pytest.raises(StorageError, match=r"wrote 1,000 of 3,000 bytes.*ulimit -f.*shard_bytes"):
        run_in_child(write_past_the_limit)
    assert os.listdir(tmp_path) == []


def test_an_error_while_tidying_up_does_not_hide_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", refuse(errno.ENOSPC))
    monkeypatch.setattr(os, "unlink", refuse(errno.EIO))
    with pytest.raises(StorageError, match="No space left"):
        create_file(tmp_path / "file", [b"one"])


def test_renaming_takes_the_place_of_what_was_there(tmp_path):
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    rename(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    assert os.listdir(tmp_path) == ["old"]


def test_renaming_what_is_not_there_names_the_target(tmp_path):
    with pytest.raises(StorageError, match=r"target: No such file or directory \(renamed into place\)"):
        rename(tmp_path / "absent", tmp_path / "target")


def test_syncing_a_missing_directory_or_a_file_names_it(tmp_path):
    with pytest.raises(StorageError, match="absent: No such file"):
        sync_directory(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file: Not a directory"):
        sync_directory(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_sync_for_directories_is_accepted(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", refuse(number))
    sync_directory(tmp_path)


def test_a_failed_sync_of_a_directory_is_an_error_and_leaks_nothing(tmp_path, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse(errno.EIO))
        with pytest.raises(StorageError, match="Input/output error"):
            sync_directory(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_making_a_directory_says_whether_it_was_made(tmp_path):
    assert make_directory(tmp_path / "new") is True
    assert make_directory(tmp_path / "new") is False
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file: File exists"):
        make_directory(tmp_path / "file")


def test_a_directory_that_cannot_be_synced_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(StorageError, match="Input/output error"):
        make_directory(tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_removing_what_is_not_there_is_fine_and_a_refusal_is_named(tmp_path, monkeypatch):
    remove_if_present(tmp_path / "absent")
    monkeypatch.setattr(os, "unlink", refuse(errno.EACCES))
    with pytest.raises(StorageError, match=r"file: Permission denied \(removed\)"):
        remove_if_present(tmp_path / "file")


def test_a_tree_that_cannot_be_removed_is_named(tmp_path):
    with pytest.raises(StorageError, match="absent: No such file"):
        remove_tree(tmp_path / "absent")


def test_an_error_that_is_explained_is_not_explained_again(tmp_path):
    with pytest.raises(StorageError) as caught, storage_errors(tmp_path / "outer", doing="outer"):
        rename(tmp_path / "absent", tmp_path / "inner")
    assert "outer" not in str(caught.value)


def test_other_errors_pass_untouched(tmp_path):
    with pytest.raises(KeyError), storage_errors(tmp_path, doing="anything"):
        raise KeyError("x")
