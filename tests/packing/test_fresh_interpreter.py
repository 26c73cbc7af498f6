"""Claims about a whole process: what it imports, what it remembers, what memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from penstock.packing import PackingSettings, pack

from .examples import draw_web_lengths


def run(program: str, *, hash_seed: str = "0") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_importing_the_room_imports_no_torch() -> None:
    assert run("""
        import sys, penstock.packing
        print("torch" in sys.modules)
    """) == "False"  # fmt: skip


@pytest.mark.stress
def test_a_fresh_interpreter_packs_the_same() -> None:
    lengths = draw_web_lengths(300_000, seed=4)
    packing = pack(lengths, PackingSettings(length=1000), key=11)
    program = f"""
        import numpy as np
        from penstock.packing import PackingSettings, pack
        packing = pack(np.array({lengths.tolist()}), PackingSettings(length=1000), key=11)
        print(packing.documents.tolist(), packing.row_offsets.tolist())
    """
    expected = f"{packing.documents.tolist()} {packing.row_offsets.tolist()}"
    assert [run(program, hash_seed=seed) for seed in ("1", "2")] == [expected, expected]


def test_documents_of_a_billion_tokens_take_memory_for_their_pieces_only() -> None:
    # 244,141 and 524,288 pieces at about 50 bytes each are 38 MB; the tokens would be gigabytes.
    figures = run("""
        import resource
        import numpy as np
        from penstock.packing import PackingSettings, count_rows, pack
        settings = PackingSettings(length=4096)
        pack(np.array([5000, 3]), settings, key=0), count_rows(np.array([5000, 3]), settings)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        packing = pack(np.array([10**9, 2**31 - 1]), settings, key=0)
        taken_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(taken_mb, packing.num_pieces, packing.lengths.sum(), packing.starts.max())
    """)
    taken_mb, num_pieces, num_tokens, last_start = map(float, figures.split())
    assert taken_mb < 80
    assert num_pieces == -(-(10**9) // 4096) + 2**31 // 4096
    assert num_tokens == 10**9 + 2**31 - 1
    assert last_start == 2**31 - 4096


def test_starts_beyond_32_bits_are_exact() -> None:
    packing = pack(np.array([2**40 + 5]), PackingSettings(length=2**24), key=0)
    order = np.argsort(packing.starts)
    np.testing.assert_array_equal(packing.starts[order], np.arange(2**16 + 1) * 2**24)
    assert packing.lengths[order][-1] == 5
