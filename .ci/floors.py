"""The oldest versions that pyproject.toml allows, as constraints for pip: what `make floors` installs and tests.

Prints a line for every dependency of the package and its extras. Test tools are those of constraints.txt, and whatever
they bring with them is left to pip. `--keep torch` takes the version of constraints.txt instead of the floor.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "safetensors", "xxhash")
ROOMS = (
    "filesystem",
    "loader",
    "order",
    "packing",
    "plan",
    "rows",
    "samples",
    "schema",
    "shards",
    "sources",
    "stages",
    "streams",
    "transforms",
)
TESTS = (
    *(f"tests/{room}" for room in (*ROOMS, "preparation", "cli", "workers")),
    "tests/test_forged_files.py",
    # These need pandas, a server of moto's, or transformers.
    "--ignore=tests/preparation/test_rows_of_this_process.py",
    "--ignore=tests/sources/test_s3.py",
    "--ignore=tests/transforms/test_chat.py",
    "--ignore=tests/transforms/test_chat_formats.py",
)
_FLOOR = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")


def floors(project: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and oldest allowed version of every dependency that users install."""
    extras = {
        name: each for name, each in project["optional-dependencies"].items() if name not in ("all", "dev", "docs")
    }
    for requirement in (*project["dependencies"], *(each for extra in extras.values() for each in extra)):
        found = _FLOOR.fullmatch(requirement)
        if found is None:
            raise SystemExit(f"pyproject.toml: {requirement!r} has no floor; write it as name>=version.")
        yield found[1], found[2]


def pinned() -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def main() -> None:
    """Print the constraints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="append", default=[], help="a package to take from constraints.txt")
    parser.add_argument("--tools", action="store_true", help="print the names of the test tools instead")
    parser.add_argument("--tests", action="store_true", help="print the tests to run instead")
    arguments = parser.parse_args()
    if arguments.tools or arguments.tests:
        print(*(TOOLS if arguments.tools else TESTS))
        return
    keep, pins = arguments.keep, pinned()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, floor in floors(project):
        print(f"{name}=={pins[name] if name in keep else floor}")
    for name in TOOLS:
        print(f"{name}=={pins[name]}")


if __name__ == "__main__":
    main()
