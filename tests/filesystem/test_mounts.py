"""Which paths depend on another machine."""

import os
from pathlib import Path

import pytest

from penstock.filesystem import _paths, filesystem_type, is_network_filesystem

LINES = [
    b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    b"30 22 0:40 / /mnt/a\\040b\\011c rw - nfs4 server:/x rw,vers=4.2",
    b"31 22 0:41 / /mnt/back\\134slash rw master:3 propagate_from:2 - fuse.sshfs host: rw",
    b"32 22 0:42 / /mnt/caf\xc3\xa9\xff rw - xfs /dev/sdb rw",
    b"33 22 0:43 / /mnt/form\x0cfeed\x85 rw - btrfs /dev/sdc rw",
    b"34 22 0:44 / /mnt/twice rw - ext4 /dev/sdd rw",
    b"35 34 0:45 / /mnt/twice rw - lustre server rw",
]


@pytest.fixture
def mounts(monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"\n".join(LINES) + b"\n")
    return _paths._mount_lines()


def test_the_root_has_a_type_and_is_on_this_machine_or_not():
    kind = filesystem_type(Path("/"))
    assert kind in Path("/proc/self/mountinfo").read_text()
    assert kind


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_a_tmpfs_is_a_tmpfs_and_no_network():
    assert filesystem_type(Path("/dev/shm")) == "tmpfs"
    assert not is_network_filesystem(Path("/dev/shm"))


def test_proc_is_told_from_what_is_around_it():
    assert filesystem_type(Path("/proc/self")) == "proc"


def test_a_path_that_is_not_there_has_no_type(tmp_path):
    assert filesystem_type(tmp_path / "absent") == ""
    assert not is_network_filesystem(tmp_path / "absent")


def test_escapes_optional_fields_and_strange_bytes_are_parsed(mounts):
    assert list(map(_paths._parse_mount, mounts)) == [
        ("/", "ext4"),
        ("/mnt/a b\tc", "nfs4"),
        ("/mnt/back\\slash", "fuse.sshfs"),
        (os.fsdecode(b"/mnt/caf\xc3\xa9\xff"), "xfs"),
        (os.fsdecode(b"/mnt/form\x0cfeed\x85"), "btrfs"),
        ("/mnt/twice", "ext4"),
        ("/mnt/twice", "lustre"),
    ]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/mnt", "ext4"),
        ("/mnt/a b\tc", "nfs4"),
        ("/mnt/a b\tc/deep/down", "nfs4"),
        ("/mnt/a b\tcd", "ext4"),
        ("/mnt/twice/x", "lustre"),
    ],
)
def test_a_device_that_no_mount_lists_is_found_by_the_longest_mount_point(mounts, path, kind):
    assert _paths._by_longest_prefix(path, mounts) == kind


def test_without_proc_nothing_is_told(monkeypatch, tmp_path):
    def refuse(_):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert filesystem_type(tmp_path) == ""


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [
        *[
            (kind, True)
            for kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "ceph", "gpfs", "9p", "virtiofs")
        ],
        *[(kind, True) for kind in ("fuse", "fuse.sshfs", "fuse.s3fs", "fuseblk")],
        *[(kind, False) for kind in ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "")],
    ],
)
def test_network_file_systems_are_known_by_their_type(monkeypatch, tmp_path, kind, is_network):
    device = os.stat(tmp_path).st_dev
    line = f"22 1 {os.major(device)}:{os.minor(device)} / / rw - {kind} source rw\n"
    monkeypatch.setattr(Path, "read_bytes", lambda _: line.encode())
    assert filesystem_type(tmp_path) == kind
    assert is_network_filesystem(tmp_path) is is_network


def test_a_mount_made_later_is_seen(monkeypatch, tmp_path):
    device = os.stat(tmp_path).st_dev
    kinds = iter(["ext4", "nfs4"])
    number = f"{os.major(device)}:{os.minor(device)}"
    monkeypatch.setattr(Path, "read_bytes", lambda _: f"22 1 {number} / / rw - {next(kinds)} x rw\n".encode())
    assert [filesystem_type(tmp_path) for _ in range(2)] == ["ext4", "nfs4"]
