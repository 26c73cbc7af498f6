"""The two readers give the same bytes, refuse anything but regular files, and notice a file that changed."""

import errno
import mmap
import os
import resource
import socket

import numpy as np
import pytest

from penstock.errors import FormatError, StorageError
from penstock.filesystem import MappedFile, PositionedFile, open_regular, read_small

from .children import addresses_in_use, run_in_child

DATA = np.random.default_rng(0).integers(0, 256, 3 * mmap.PAGESIZE + 100, dtype=np.uint8).tobytes()

both = pytest.mark.parametrize("reader", [MappedFile, PositionedFile])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


@both
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (0, len(DATA)), (5000, 9000), (len(DATA) - 1, len(DATA))])
def test_any_range_is_read_and_cannot_be_written(path, reader, begin, end):
    found = reader(path).read(begin, end)
    assert found.tobytes() == DATA[begin:end]
    assert found.dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0


@both
def test_size_path_and_identity_are_known(path, reader):
    file = reader(path)
    assert (file.size, file.path) == (len(DATA), path)
    assert file.identity == reader(path).identity


@both
@pytest.mark.parametrize("change", ["rewrite", "replace", "touch"])
def test_identity_changes_with_the_file(path, reader, change):
    before = reader(path).identity
    if change == "rewrite":
        path.write_bytes(DATA[:-1])
    elif change == "replace":
        path.with_name("other").write_bytes(DATA)
        os.replace(path.with_name("other"), path)
    else:
        os.utime(path, ns=(0, 12345))
    assert reader(path).identity != before


@both
def test_an_empty_file_is_read(tmp_path, reader):
    (tmp_path / "empty").touch()
    file = reader(tmp_path / "empty")
    assert (file.size, len(file.read(0, 0))) == (0, 0)
    file.populate(0, 0)
    file.will_need(0, 0)
    file.check_size()


@both
def test_populating_and_announcing_change_nothing(path, reader):
    file = reader(path)
    file.populate(100, len(DATA))
    file.will_need(5000, 9000)
    assert file.read(0, len(DATA)).tobytes() == DATA


@both
@pytest.mark.parametrize("size", [0, 100, mmap.PAGESIZE, len(DATA) - 1, len(DATA) + 1])
def test_a_file_that_changed_its_size_is_an_error_with_both_sizes(path, reader, size):
    file = reader(path)
    os.truncate(path, size)
    with pytest.raises(StorageError, match=f"file has {size:,} bytes; it had {len(DATA):,}"):
        file.check_size()
    with pytest.raises(StorageError, match=f"file has {size:,} bytes"):
        file.populate(0, len(DATA))


def test_a_positioned_read_beyond_a_shrunk_file_is_an_error(path):
    file = PositionedFile(path)
    os.truncate(path, 5000)
    assert file.read(0, 5000).tobytes() == DATA[:5000]
    with pytest.raises(StorageError, match="file has 5,000 bytes"):
        file.read(4000, 6000)


def test_a_page_that_is_gone_is_an_error_and_not_a_signal(path, monkeypatch):
    file = MappedFile(path)
    os.truncate(path, 100)
    monkeypatch.setattr(file, "check_size", lambda: None)  # shrunk between the look and the touch
    with pytest.raises(StorageError, match="cannot be read"):
        file.populate(0, len(DATA))


def test_a_kernel_without_populate_is_accepted(path, monkeypatch):
    file = MappedFile(path)

    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(file, "_advise", refuse)
    file.populate(0, len(DATA))


def test_a_failing_disk_is_named(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(StorageError, match=r"file: Input/output error \(read\)\. Check the path and the disk"):
        PositionedFile(path).read(0, 10)


def test_short_reads_are_continued(path, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    assert PositionedFile(path).read(3, 1000).tobytes() == DATA[3:1000]


@both
def test_a_link_is_refused(path, reader):
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(FormatError, match="link is a symbolic link"):
        reader(link)


@both
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, reader):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="pipe is not a regular file"):
        reader(tmp_path / "pipe")


@both
def test_a_socket_a_device_and_a_directory_are_refused(tmp_path, reader, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is at most 108 bytes long
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket")
        for name in ("socket", "/dev/null", "."):
            with pytest.raises(FormatError, match="not a regular file"):
                reader(tmp_path / name)


@both
def test_what_is_not_there_is_not_found(path, reader):
    with pytest.raises(FileNotFoundError):
        reader(path.with_name("absent"))
    with pytest.raises(NotADirectoryError):
        reader(path / "below")


def test_a_refused_open_is_a_storage_error_that_names_the_file(path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"file: Too many open files \(opened\)\. .*`ulimit -n`"):
        open_regular(path)


def test_a_map_takes_no_descriptor_besides_the_files(path):
    def open_with_one_left():
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
        assert bytes(MappedFile(path).read(0, len(DATA))) == DATA

    run_in_child(open_with_one_left)


def test_a_map_that_is_refused_is_an_error_that_names_the_file_and_the_way_out(path):
    def refused():
        os.truncate(path, 8 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (addresses_in_use() + (1 << 30),) * 2)
        MappedFile(path)

    with pytest.raises(StorageError, match=r"file: mapping failed: .*`ulimit -v`.*io='pread'"):
        run_in_child(refused)


@both
def test_descriptors_are_given_back_also_by_what_was_refused(path, reader):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        reader(path).read(0, 10)
        with pytest.raises(FormatError):
            reader(path.parent)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_small_file_that_somebody_named_may_be_behind_a_link(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    assert read_small(tmp_path / "link", len(DATA)) == DATA
    with pytest.raises(FormatError, match=r"has 12,388 bytes; 100 is the limit"):
        read_small(path, 100)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_may_never_end_is_not_read_as_a_small_file(tmp_path, kind):
    place = tmp_path / "place"
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "device":
            place.symlink_to("/dev/zero")
        case "folder":
            place.mkdir()
    with pytest.raises(FormatError, match="place is not a regular file"):
        read_small(place, 100)
