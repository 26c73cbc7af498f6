"""Compiles the C files of all rooms into one library, without anything but Python and a C compiler.

    python src/penstock/native/_build.py [folder [flags]]

writes `kernels.so` (any processor of this kind) and, on x86-64, `kernels-v3.so` (with AVX2) into the folder, by default
this one. The build hook calls it for wheels and for `pip install --editable`, the loader when it finds itself in a
source checkout whose C files changed. It imports nothing of Penstock, because at build time there is nothing to import.

The compiler is `CC`, or the first of `cc`, `gcc`, `clang` that is installed, or Zig's from the package `ziglang`.
"""

import hashlib
import os
import sys
from pathlib import Path

# What only a build needs is imported by it: every process of a source checkout asks for the digest.

FOLDER = Path(__file__).parent
LIBRARY, LIBRARY_V3 = "kernels.so", "kernels-v3.so"
_FLAGS = (
    "-std=c11",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror=implicit",
)
_COMPILERS = ("cc", "gcc", "clang")
_MARK = b"penstock kernels "  # before the digest, in `library.c`


class BuildError(Exception):
    """The library cannot be compiled; the message says why."""


def sources(package: Path = FOLDER.parent) -> list[Path]:
    """The C files, and the header last; empty where Penstock was installed from a wheel."""
    return [*sorted(package.glob("*/*.c")), *sorted(package.glob("*/*.h"))]


def source_digest() -> bytes:
    """What tells whether a library was made from these sources."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (*sources(), Path(__file__)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest().encode()


def is_current(library: Path, digest: bytes) -> bool:
    """Whether the library was made from sources with this digest."""
    try:
        return _MARK + digest in library.read_bytes()
    except OSError:
        return False


def find_compiler() -> list[str] | None:
    """The command of a C compiler, or None if there is none."""
    import importlib.util
    import platform
    import shlex
    import shutil

    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is None:
        return None
    zig = [sys.executable, "-m", "ziglang", "cc"]
    if platform.libc_ver()[0] == "glibc":  # one that every distribution of the last ten years has
        zig += ["-target", f"{platform.machine()}-linux-gnu.2.17"]
    return zig


def build(folder: Path = FOLDER, flags: tuple[str, ...] = ("-O3",)) -> None:
    """Compile the libraries into the folder, one process at a time, unless those there are current.

    Raises:
        BuildError: there is no compiler, or it failed.
        OSError: the folder cannot be written to.
    """
    import fcntl
    import platform
    import tempfile

    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"there is no C compiler: none of {', '.join(_COMPILERS)}, and no package `ziglang`")
    digest = source_digest()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_current(folder / LIBRARY, digest):  # somebody else was faster
            return
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as name:
            if platform.machine() == "x86_64":
                level = "x86_64_v3" if "ziglang" in compiler else "x86-64-v3"  # Zig has names of its own
                _compile([*compiler, *_FLAGS, *flags, f"-march={level}"], digest, Path(name, LIBRARY_V3))
                os.rename(Path(name, LIBRARY_V3), folder / LIBRARY_V3)
            _compile([*compiler, *_FLAGS, *flags], digest, Path(name, LIBRARY))
            os.rename(Path(name, LIBRARY), folder / LIBRARY)  # the last: who finds it finds both
    finally:
        os.close(descriptor)


def _compile(command: list[str], digest: bytes, library: Path) -> None:
    import subprocess

    define = f'-DSOURCE_DIGEST="{digest.decode()}"'
    files = [str(path) for path in sources() if path.suffix == ".c"]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(library.parent), "ZIG_LOCAL_CACHE_DIR": str(library.parent)}
    done = subprocess.run(  # noqa: S603 - the compiler is the user's own
        [*command, define, "-o", str(library), *files],
        env={"PATH": os.defpath} | caches | os.environ,  # a compiler looks for the assembler
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stdout}")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, tuple(sys.argv[2:]) or ("-O3",))
