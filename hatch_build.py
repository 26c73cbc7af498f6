"""Compiles Penstock's C library while a wheel is built or an editable install is made.

Without a C compiler on the machine, and only then, the build asks for Zig's, the package `ziglang`. The wheel
fits every Python, and every Linux whose C library has what this one uses.
"""

import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).parent
_NATIVE = _ROOT / "src" / "penstock" / "native"


class KernelsHook(BuildHookInterface):
    """Adds the library to a wheel; compiles it in place for an editable install."""

    def dependencies(self) -> list[str]:
        """A compiler, if there is none."""
        return [] if _load_build().find_compiler() else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what is not current, and name the platforms that the wheel is for."""
        build = _load_build()
        build.build()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(_NATIVE / build.LIBRARY)}"
        if version != "editable":
            libraries = (_NATIVE / build.LIBRARY, _NATIVE / build.LIBRARY_V3)
            build_data["force_include"] |= {
                str(path): f"penstock/native/{path.name}" for path in libraries if path.exists()
            }


def _load_build() -> Any:
    """`_build.py`, by its path: neither Penstock nor numpy is installed when it is built."""
    spec = importlib.util.spec_from_file_location("penstock_build", _NATIVE / "_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform(library: Path) -> str:
    """The platform of a wheel: manylinux of the newest glibc that the library needs, which is its only dependency."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    needed = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())]
    if not needed or not platform.startswith("linux_"):
        return platform
    return f"manylinux_2_{max(17, *needed)}_{platform.removeprefix('linux_')}"
