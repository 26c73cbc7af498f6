"""Programs in places that allow less than this one does, as some containers do.

    python -m confined 319=38 /proc=0 /dev/shm=65536 -- COMMAND
        system call 319 fails with error 38; /proc is empty; /dev/shm has room for 64 KiB

The filter is the kernel's own (seccomp), and so are the mounts: programs that the command starts are confined, too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_NOT_CONFINED = 77
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # from linux/prctl.h and linux/seccomp.h
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # from linux/sched.h
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14  # from linux/mount.h

_libc = ctypes.CDLL(None, use_errno=True)


def without_memory_files(error: int) -> str:
    """How a program is confined: `memfd_create` fails with this error."""
    number = _MEMFD_CREATE.get(platform.machine())
    if number is None:
        pytest.skip(f"the number of memfd_create on {platform.machine()} is not known here")
    return f"{number}={error}"


def run_confined(hows: list[str], command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program confined in these ways; skip the test where the kernel does not allow that."""
    path = os.pathsep.join((str(_TESTS), *sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "confined", *hows, "--", sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if done.returncode == _NOT_CONFINED:
        pytest.skip(done.stderr.strip())
    return done


def _refuse(number: int, error: int) -> None:
    """Have a system call fail, in this process and all it starts: load its number; if it is this one, fail, else allow.

    Other architectures' numbers are not looked at: this is no protection.
    """
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, _FAIL | error), (0x06, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    description = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(program)))
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _check(_libc.prctl(_SET_SECCOMP, _FILTER, description, 0, 0), "seccomp")


def _own_mounts() -> None:
    """Mounts from here on are this process's own."""
    if _libc.unshare(_NEW_MOUNTS) != 0:  # only root may; others may in a user namespace of their own
        user, group = os.getuid(), os.getgid()
        _check(_libc.unshare(_NEW_USER | _NEW_MOUNTS), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _check(_libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "making mounts private")


def _cover(folder: str, num_bytes: int) -> None:
    """Mount an empty file system of this size over a folder; 0 is without a limit."""
    _check(_libc.mount(b"none", folder.encode(), b"tmpfs", 0, f"size={num_bytes}".encode()), f"mounting over {folder}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _main() -> None:
    end = sys.argv.index("--")
    hows = dict(how.split("=") for how in sys.argv[1:end])
    folders = {how: int(size) for how, size in hows.items() if how.startswith("/")}
    try:
        if folders:
            _own_mounts()
        for folder, size in sorted(folders.items()):
            _cover(folder, size)
        for number in hows.keys() - folders.keys():
            _refuse(int(number), int(hows[number]))
    except OSError as error:
        print(f"this kernel does not let programs be confined: {error}", file=sys.stderr)
        sys.exit(_NOT_CONFINED)
    os.execv(sys.argv[end + 1], sys.argv[end + 1 :])


if __name__ == "__main__":
    _main()
