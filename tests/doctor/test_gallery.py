"""The gallery in examples/doctor: the illness of each ill script is named first, and the healthy ones are let go.

`benchmarks/bench_doctor.py` runs all of it, with repetitions, and compares gains with fixes applied by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .scripts import diagnose

pytest.importorskip("torch")

GALLERY = Path(__file__).parents[2] / "examples" / "doctor"
ILL = {
    "no_workers": "no-workers",
    "too_many_workers": "too-many-workers",
    "needless_workers": "needless-workers",
    "small_prefetch": "small-prefetch",
    "heavy_collate": "heavy-collate",
    "slow_samples": "slow-samples",
    "padding": "padding",
    "workers_restart": "workers-restart",
    "gil_threads": "gil-threads",
    "cold_reads": "cold-reads",
    "hand_over": "hand-over",
    "odd_batch": "odd-batch-size",
    "growing_workers": "growing-workers",
}
HEALTHY = ("healthy_compute", "healthy_fed", "healthy_tiny")


@pytest.mark.stress
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ILL)
def test_the_illness_is_named_first(name: str) -> None:
    found = diagnose(str(GALLERY / f"{name}.py"), options=("--seconds", "40"))
    assert [each["id"] for each in found["findings"]][:1] == [ILL[name]], found
    assert found["exit_code"] == 1


@pytest.mark.stress
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_script(name: str) -> None:
    found = diagnose(str(GALLERY / f"{name}.py"), options=("--seconds", "40"))
    assert found["findings"] == [], found
    assert "Not waiting for data" in found["verdict"]
    assert found["exit_code"] == 0
