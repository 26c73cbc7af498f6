"""`penstock top`: what servers say of themselves, as a table and as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

import penstock
from penstock.cli import main
from penstock.cli._servers import table_of
from penstock.service import Reading, serve


def test_one_look_as_json_has_every_server_and_says_which_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    plan = penstock.from_arrays({"x": np.arange(100)}).batch(10)
    with serve(plan, "127.0.0.1:0", num_workers=1) as server:
        with penstock.DataLoader(plan, remote=server.address) as loader:
            assert len(list(loader)) == 10
        assert main(["top", server.address, "--json"]) == 0
        (alone,) = json.loads(capsys.readouterr().out)
        assert (alone["server"], alone["problem"], alone["workers"]) == (server.address, None, 1)
        assert alone["batches_total"] >= 10
        assert main(["top", server.address, "127.0.0.1:1", "--json"]) == 1
        assert "refused" in json.loads(capsys.readouterr().out)[1]["problem"]


def test_the_table_shows_rates_between_two_looks_and_none_across_a_restart() -> None:
    def look(at: float, batches: float) -> Reading:
        return Reading("cpu1:8815", at, {"batches_total": batches, "sent_bytes_total": batches * 1e6})

    console = Console(width=120)
    with console.capture() as captured:
        console.print(table_of([look(12, 250)], [look(10, 50)]))
    assert captured.get().count("100.0") == 2  # batches/s and MB/s
    assert look(12, 5).rate("batches_total", look(10, 50)) is None
    with console.capture() as captured:
        console.print(table_of([look(12, 250), Reading("[::1]:1", 12, {}, "[Errno 111] refused [/b]")], []))
    assert captured.get().splitlines()[-1] == "[::1]:1: [Errno 111] refused [/b]"
    assert look(12, 5).rate("batches_total", None) is None
