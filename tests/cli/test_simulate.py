"""`penstock simulate` says what nodes would fetch, as a report, a page and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.cli import main


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    with penstock.DatasetWriter(folder / "data", {"x": "int64[512]"}, shard_bytes=1 << 18) as writer:
        writer.write_batch({"x": np.zeros((2048, 512), np.int64)})
    plan = penstock.open(folder / "data").shuffle(7, lanes=8).batch(32)
    (folder / "plan.toml").write_text(plan.to_toml())
    return folder / "plan.toml"


def test_a_report_says_what_nodes_fetch_and_ends_well(plan_file: Path, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    flags = ["--nodes", "4", "--ranks", "2", "--cache", "1GB", "--bandwidth", "1Gb", "--step-seconds", "1"]
    assert main(["simulate", str(plan_file), *flags, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "4 nodes fetch" in shown
    assert "nodes 4 of 2 ranks · cache 1 GB · bandwidth 125 MB/s · step 1 s" in shown
    assert "What a node fetches" in page.read_text()


def test_json_has_the_figures(plan_file: Path, capsys) -> None:
    assert main(["simulate", str(plan_file), "--nodes", "2", "--epochs", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == penstock.load_plan(plan_file).egress(2, epochs=3).to_json() | {"simulated_nodes": [0, 1]}
    assert len(found["epochs"]) == 3


@pytest.mark.parametrize(
    "flags", [["--cache", "1MB"], ["--bandwidth", "1Mb", "--step-seconds", "0.01"]], ids=["cache", "slow"]
)
def test_what_is_not_enough_is_a_finding(plan_file: Path, capsys, flags: list[str]) -> None:
    assert main(["simulate", str(plan_file), *flags]) == 1
    shown = capsys.readouterr().out
    assert "The cache must hold" in shown or "The bandwidth is enough for steps of" in shown


@pytest.mark.parametrize(
    ("text", "expected"), [("25Gb", 25e9 / 8), ("100Mbps", 12.5e6), ("3GB/s", 3e9), ("1.5GB", 1.5e9), ("8kbit/s", 1e3)]
)
def test_a_bandwidth_is_in_bits_or_bytes(text: str, expected: float) -> None:
    from penstock.cli._values import rate

    assert rate(text) == expected


def test_what_is_no_bandwidth_is_wrong_usage(plan_file: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(plan_file), "--bandwidth", "25"])
    assert ended.value.code == 2
    assert "'25' is not a bandwidth, such as 25Gb or 3GB" in capsys.readouterr().err
