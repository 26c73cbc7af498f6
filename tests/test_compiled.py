"""Where compiled loops are kept, and that they run where they cannot be."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numba
import pytest

import penstock
from penstock.compiled import check_trusted, compiled

CODE = "from penstock.order import _kernels; print(int(_kernels.child_key(1, 2)))"


def run(code: str, *, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=os.environ | environment, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_loop_called_with_constants_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))  # or what an earlier run kept is loaded

    @compiled
    def add(one: int, other: int) -> int:
        return one + other

    @compiled
    def add_some(number: int) -> int:
        return add(number, 0) + add(number, 1) + add(2, number) + add(one=3, other=number)

    assert add_some(10) == 10 + 11 + 12 + 13
    assert len(add.signatures) == 1  # type: ignore[attr-defined]


@pytest.fixture
def read_only_package(tmp_path: Path) -> dict[str, str]:
    """A copy whose folders take no `__pycache__`, and a home that takes nothing: root may write to read-only ones."""
    copy = tmp_path / "site" / "penstock"
    shutil.copytree(Path(penstock.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        (folder / "__pycache__").touch()
    return {"PYTHONPATH": str(copy.parent), "HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}


@pytest.mark.stress
def test_without_a_place_of_numbas_they_are_kept_in_a_temporary_folder_of_ones_own(
    tmp_path: Path, read_only_package: dict[str, str]
) -> None:
    assert run(CODE, TMPDIR=str(tmp_path), **read_only_package) == run(CODE)
    (folder,) = tmp_path.glob("penstock-kernels-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("*child_key*.nbc"))


def test_a_temporary_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, read_only_package: dict[str, str]
) -> None:
    folder = tmp_path / f"penstock-kernels-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert run(CODE, TMPDIR=str(tmp_path), **read_only_package) == run(CODE)
    assert list(folder.iterdir()) == []


def test_a_full_disk_keeps_nothing_and_stops_nothing(tmp_path: Path) -> None:
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"  # no file may have a byte
    assert run(limited + CODE, NUMBA_CACHE_DIR=str(tmp_path)) == run(CODE)


@pytest.mark.stress
def test_kept_code_that_cannot_be_read_is_compiled_again(tmp_path: Path) -> None:
    expected = run(CODE, NUMBA_CACHE_DIR=str(tmp_path))
    for path in tmp_path.rglob("*.nbc"):
        data = path.read_bytes()
        path.write_bytes(data.replace(b"BC\xc0\xde", b"BC\xc0\xdf").replace(b"\x7fELF", b"\x7fELG"))
        assert path.read_bytes() != data
    assert run(CODE, NUMBA_CACHE_DIR=str(tmp_path)) == expected


class Payload:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._proof),)


def plant(folder: Path, proof: Path) -> None:
    """Put a payload in place of every kernel that is kept under `folder`."""
    planted = [path for pattern in ("*.nbi", "*.nbc") for path in folder.rglob(pattern)]
    assert planted
    for path in planted:
        path.write_bytes(pickle.dumps(Payload(proof)))


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def give_away(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(folder, 65534, 65534)


@pytest.mark.parametrize(
    ("place", "expose", "exposed"),
    [
        ("HOME", give_away, "inner"),
        pytest.param("NUMBA_CACHE_DIR", open_to_all, ".cache", marks=pytest.mark.stress),
    ],
)
def test_kernels_that_another_user_may_have_put_there_are_not_run(
    tmp_path: Path,
    read_only_package: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    expose: Callable[[Path], None],
    exposed: str,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    shared, temporary, proof = tmp_path / "shared", tmp_path / "temporary", tmp_path / "proof"
    shared.mkdir()
    temporary.mkdir()
    (tmp_path / "link").symlink_to(shared)
    named = {"HOME": shared, "NUMBA_CACHE_DIR": tmp_path / "link" / ".cache" / "numba"}[place]
    environment = {**read_only_package, "TMPDIR": str(temporary), place: str(named)}
    if place == "HOME":
        del environment["XDG_CACHE_HOME"]
    expected = run(CODE, **environment)
    (inner,) = (shared / ".cache" / "numba").glob("order_*")
    assert list(temporary.iterdir()) == []  # they are kept in the place that is now taken over
    taken_over = inner if exposed == "inner" else shared / exposed
    plant(taken_over, proof)
    expose(taken_over)
    assert run(CODE, **environment) == expected
    assert not proof.exists()
    assert list(temporary.rglob("*child_key*.nbc"))


@pytest.mark.parametrize("exposed", ["", "above", "above/kept"])
@pytest.mark.parametrize("expose", [open_to_all, give_away])
def test_a_place_is_refused_if_any_folder_on_the_way_is_not_this_users_alone(
    tmp_path: Path, expose: Callable[[Path], None], exposed: str
) -> None:
    module, kept = tmp_path / "package" / "module.py", tmp_path / "room" / "above" / "kept"
    module.parent.mkdir()
    module.touch()
    kept.mkdir(parents=True)
    check_trusted(kept, module)
    expose(tmp_path / "room" / exposed)
    with pytest.raises(PermissionError, match=str(tmp_path / "room" / exposed)):
        check_trusted(kept, module)


def test_a_sticky_folder_may_be_on_the_way_but_is_no_place(tmp_path: Path) -> None:
    module, kept = tmp_path / "module.py", tmp_path / "shared" / "kept"
    module.touch()
    kept.mkdir(parents=True)
    kept.parent.chmod(0o1777)
    check_trusted(kept, module)
    with pytest.raises(PermissionError, match="Others can write"):
        check_trusted(kept.parent, module)


def test_who_may_change_the_module_may_change_its_kernels(tmp_path: Path) -> None:
    module, kept = tmp_path / "package" / "module.py", tmp_path / "package" / "__pycache__"
    kept.mkdir(parents=True)
    module.touch()
    kept.chmod(0o775)
    with pytest.raises(PermissionError, match="Others can write"):
        check_trusted(kept, module)
    kept.parent.chmod(0o775)  # as under umask 002
    check_trusted(kept, module)


@pytest.mark.stress
def test_without_a_home_nothing_is_kept_in_or_taken_from_the_current_folder(
    tmp_path: Path, read_only_package: dict[str, str]
) -> None:
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    homeless = "import os, pwd; del os.environ['HOME'], os.environ['XDG_CACHE_HOME']; pwd.getpwuid = {}.__getitem__\n"
    assert run(homeless + CODE, cwd=here, **read_only_package, TMPDIR=str(temporary)) == run(CODE)
    assert list(here.iterdir()) == []
    assert list(temporary.rglob("*child_key*.nbc"))


def test_kept_kernels_are_loaded_without_what_only_a_compilation_needs() -> None:
    """Numba's tables of types and functions, and its extensions, take longer than all else that a worker loads."""
    script = """
import sys, numpy as np, penstock
penstock.from_arrays({"x": np.arange(9)}).shuffle(seed=1).batch(3).read(0)
print("numba.np.linalg" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    subprocess.run(command, check=True, timeout=200)  # so that they are kept
    assert subprocess.run(command, check=True, timeout=100, capture_output=True).stdout == b"False\n"


ATTACKER, VICTIM = 54_321, 54_322
"""Users without a name, a home or anything else."""
BECOME = """
import ctypes, os, struct
libc, read_all = ctypes.CDLL(None), 1 << 2  # CAP_DAC_READ_SEARCH: this interpreter may be in root's home
libc.prctl(8, 1, 0, 0, 0)  # keep capabilities over a change of user
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
libc.capset(struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", read_all, read_all, 0, 0, 0, 0))
os.umask(0o022)
"""
"""Makes a program of root's one of another user, who can read all files and write none but its own."""


class SharedMachine:
    """A folder that everybody can write to, as `/tmp`, and a package that only root can."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.shared, self.package = folder / "tmp", folder / "site"
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        self.proof = self.shared / "proof"

    def run(self, user: int, code: str, *, home: Path | None) -> str:
        """What a program of a user prints; it stands in the shared folder."""
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.package), "TMPDIR": str(self.shared)}
        environment |= {} if home is None else {"HOME": str(home)}
        command = [sys.executable, "-c", f"user = {user}\n{BECOME}\n{code}"]
        done = subprocess.run(
            command, cwd=self.shared, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def plant(self, folder: Path) -> None:
        """Have the attacker put payloads in place of all kernels under a folder, which others may use as theirs."""
        payload = pickle.dumps(Payload(self.proof))
        code = f"""
import pathlib
planted = [path for path in pathlib.Path({str(folder)!r}).rglob("*.nb?")]
for path in planted:
    path.write_bytes({payload!r})
    path.parent.chmod(0o777)
print(len(planted))
"""
        assert int(self.run(ATTACKER, code, home=None)) >= 2


@pytest.fixture
def machine(read_only_package: dict[str, str]) -> Iterator[SharedMachine]:
    if os.getuid() != 0:
        pytest.skip("only root can run programs as other users")
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        machine = SharedMachine(Path(name))
        shutil.copytree(read_only_package["PYTHONPATH"], machine.package)
        try:
            machine.run(VICTIM, "import numba", home=None)
        except (AssertionError, PermissionError):
            pytest.skip(f"other users cannot run {sys.executable}")
        yield machine


@pytest.mark.stress
def test_kernels_that_another_user_planted_are_not_run_with_a_shared_home_or_without_one(
    machine: SharedMachine,
) -> None:
    """They lie wherever they could be looked for: in the home, the current folder, and where temporary files are."""
    expected = machine.run(ATTACKER, CODE, home=machine.shared)
    lay_out = f"""
import pathlib, shutil
kept = next(pathlib.Path(".cache/numba").glob("order_*"))
for place in ("~/.cache/numba", "__pycache__", "penstock-kernels-{VICTIM}"):
    shutil.copytree(kept, pathlib.Path(place) / kept.name)
    shutil.copytree(kept, place, dirs_exist_ok=True)
"""
    machine.run(ATTACKER, lay_out, home=None)
    machine.plant(machine.shared)
    for home in (machine.shared, None):
        assert machine.run(VICTIM, CODE, home=home) == expected
        assert not machine.proof.exists()
    closed = "import pathlib\nfor path in pathlib.Path('.cache/numba').glob('order_*'): path.chmod(0o755)\n"
    machine.run(ATTACKER, f"{closed}try:\n  {CODE}\nexcept Exception: pass", home=machine.shared)
    assert machine.proof.exists()  # whoever trusts such a place runs what is there
