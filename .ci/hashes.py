"""Writes hashes.txt: the packages of constraints.txt with the digests of their files, as PyPI publishes them. And
.ci/compiler.txt, the same for a C compiler.

For `make setup HASHES=hashes.txt`, which takes no file whose digest is another. torch is left out: its builds for CPUs
alone come from another index, and those of PyPI bring packages that they do not need.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("torch",)
COMPILER = "ziglang==0.17.0"  # for a machine that has none: not among the constraints, or everybody would install it
_FILE = re.compile(r'href="[^"]*/([^"/]+)#sha256=([0-9a-f]{64})"')
_PYTHONS = re.compile(r"cp3(11|12|13)|abi3|py3")
_PLATFORMS = re.compile(r"any$|manylinux.*_(x86_64|aarch64)$")


def files(name: str) -> Iterator[tuple[str, str]]:
    """(file name, SHA-256) of everything that PyPI has of a package."""
    with urllib.request.urlopen(f"https://pypi.org/simple/{canonicalize_name(name)}/", timeout=60) as page:
        yield from _FILE.findall(page.read().decode())


def is_wanted(file: str, version: Version) -> bool:
    """Whether it is of this version, and for one of our platforms."""
    try:
        if not file.endswith(".whl"):
            return parse_sdist_filename(file)[1] == version
        _, found, _, tags = parse_wheel_filename(file)
    except (InvalidSdistFilename, InvalidVersion, InvalidWheelFilename):
        return False
    return found == version and any(
        _PYTHONS.search(f"{tag.interpreter} {tag.abi}") and _PLATFORMS.search(tag.platform) for tag in tags
    )


def entry(pin: str) -> str:
    """The lines of one package."""
    name, _, version = pin.partition("==")
    digests = sorted({digest for file, digest in files(name) if is_wanted(file, Version(version))})
    if not digests:
        raise SystemExit(f"PyPI has no file of {pin} that this project could use.")
    return " \\\n".join((pin, *(f"    --hash=sha256:{digest}" for digest in digests)))


def main() -> None:
    """Write the file."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#") and line.partition("==")[0] not in LEFT_OUT]
    with ThreadPoolExecutor(8) as readers:
        entries = list(readers.map(entry, pins))
    head = "# Made from constraints.txt by .ci/hashes.py, for `make setup HASHES=hashes.txt`.\n"
    (ROOT / "hashes.txt").write_text(head + "\n".join(entries) + "\n")
    (ROOT / ".ci" / "compiler.txt").write_text(head.replace("from constraints.txt by", "by") + entry(COMPILER) + "\n")


if __name__ == "__main__":
    main()
