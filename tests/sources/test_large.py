from __future__ import annotations

from pathlib import Path

import pytest

from penstock.sources import PartRun

from .examples import recipe_of

GIGABYTES = 2
PARTS = 7


def bytes_read() -> int:
    """What this process has read from files so far."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_file_of_2_gb_is_read_once_and_its_records_come_once(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    block = b"".join(b"%d %s\n" % (number, b"x" * (number % 400)) for number in range(50_000))
    num_blocks = (GIGABYTES << 30) // len(block) + 1
    with path.open("wb") as file:
        for _ in range(num_blocks):
            file.write(block)
    recipe = recipe_of(path)
    before = bytes_read()
    num_records = 0
    for part in range(PARTS):
        run = PartRun(recipe, part=part, num_parts=PARTS, epoch=0)
        num_records += sum(1 for _ in run)
    assert num_records == num_blocks * 50_000
    assert bytes_read() - before <= path.stat().st_size + PARTS * (4 << 10) + PARTS * 1000
