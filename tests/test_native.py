"""The C library: it is built where it is needed and nowhere else, and what is wrong with it is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import penstock
from penstock.native import ARRAY, INT, kernel

PROGRAM = "from penstock.order import Permutation; print(Permutation(9, 7)(range(9)).tolist())"
has_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


class Copy:
    """A source checkout, without the library."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "src" / "penstock"
        self.native = self.package / "native"
        left_out = shutil.ignore_patterns("__pycache__", "*.so", ".build-*")
        shutil.copytree(Path(penstock.__file__).parent, self.package, ignore=left_out)

    def run(self, **environment: str) -> str:
        """What a program prints, on either stream."""
        inherited = {name: value for name, value in os.environ.items() if name != "PENSTOCK_KERNELS"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**inherited, "PYTHONPATH": str(self.package.parent), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    def install(self) -> None:
        """Make it what a wheel installs."""
        for path in (*self.package.glob("*/*.c"), *self.package.glob("*/*.h")):
            path.unlink()

    @property
    def library(self) -> Path:
        return self.native / "kernels.so"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.fixture
def expected() -> str:
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout


@has_compiler
def test_a_checkout_builds_its_library_once_and_again_when_a_c_file_changed(copy: Copy, expected: str) -> None:
    assert copy.run() == expected
    first = copy.library.stat()
    assert copy.run() == expected
    assert copy.library.stat() == first
    with (copy.package / "order" / "_kernels.c").open("a") as source:
        source.write("/* changed */\n")
    assert copy.run() == expected
    assert copy.library.stat().st_ino != first.st_ino
    assert not list(copy.native.glob(".build-*"))


@has_compiler
def test_processes_that_start_together_build_one_library(copy: Copy, expected: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(copy.package.parent)}
    command = [sys.executable, "-c", PROGRAM]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == [expected] * 3


def test_without_a_compiler_the_command_that_builds_it_is_named(copy: Copy) -> None:
    said = copy.run(PATH="/nowhere", CC="")
    assert "was not built from the sources beside it, and cannot be built: there is no C compiler" in said
    assert f"-m pip install --editable {copy.package.parent.parent}" in said


@has_compiler
def test_what_the_compiler_says_is_handed_on(copy: Copy) -> None:
    source = copy.package / "order" / "_kernels.c"
    source.write_text("int broken(void) { return nothing; }")
    said = copy.run()
    assert "cannot be built: " in said
    assert f"{source}: In function" in said or f"{source}:1:" in said
    assert not copy.library.exists()


def test_an_installed_package_never_builds(copy: Copy) -> None:
    copy.install()
    said = copy.run()
    assert "kernels.so cannot be loaded" in said
    assert "-m pip install --force-reinstall --no-deps penstock" in said
    assert not copy.library.exists()


@pytest.mark.parametrize("content", [b"", b"\x7fELF of another machine"])
def test_a_foreign_library_is_named_with_the_command_that_replaces_it(copy: Copy, content: bytes) -> None:
    copy.install()
    copy.library.write_bytes(content)
    said = copy.run()
    assert f"{copy.library} cannot be loaded" in said
    assert "-m pip install --force-reinstall --no-deps penstock" in said


def test_a_library_can_be_named(copy: Copy, expected: str) -> None:
    native = Path(penstock.__file__).parent / "native"
    copy.install()
    assert copy.run(PENSTOCK_KERNELS=str(native / "kernels.so")) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(4, np.int32),
        np.zeros(4, ">i8"),
        np.zeros(4, np.uint64),
        np.zeros(8, np.int64)[::2],
        np.zeros(33, np.uint8)[1:].view(np.int64),
        np.zeros(2, np.int64),
    ],
)
def test_an_array_of_another_kind_is_refused_before_it_is_touched(wrong: NDArray[np.generic]) -> None:
    permute = kernel("order_permute", ARRAY, ARRAY, INT, INT)
    good = np.arange(4)
    with pytest.raises(TypeError, match=r"order_permute does not take int64\[4\], "):
        permute(good, wrong, 4, 0)
    good.flags.writeable = False
    with pytest.raises(TypeError):
        permute(np.arange(4), good, 4, 0)
    assert good.tolist() == [0, 1, 2, 3]
    assert not wrong.any()


def test_what_is_not_a_number_is_no_argument() -> None:
    with pytest.raises(Exception, match="argument 3"):
        kernel("order_permute", ARRAY, ARRAY, INT, INT)(np.arange(2), np.arange(2), "x", 0)
