"""Worker processes: deaths are made good, failures arrive whole, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from confined import run_confined
from penstock.errors import FormatError, TransformFailed, WorkerDied
from penstock.machine import usable_cpus
from penstock.preparation import Progress, prepare
from penstock.transforms import FunctionTransform, Tokenize
from penstock.workers import _failures
from waiting import wait_until

from .corpora import make_corpus, write_jsonl

pytestmark = pytest.mark.usefixtures("worker_processes")
TYPES = {"length": "int64"}


def children() -> set[int]:
    """The processes below this one; tests of other rooms leave a fork server there, which lives as long as it does."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def shared_memory() -> set[str]:
    """What lies in /dev/shm but for what tests running beside these put there."""
    return {
        name for name in os.listdir("/dev/shm") if not name.startswith(("penstock-test-", "torch_", "psm_", "sem."))
    }


def test_a_killed_worker_costs_its_task_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_corpus(tmp_path / "src", 4, 60)
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(tmp_path / "mark"))
    transform = FunctionTransform("preparation.functions:suicidal_once", types=TYPES)
    seen: list[Progress] = []
    done = prepare(
        f"{tmp_path}/src/*.jsonl",
        tmp_path / "data",
        transform=transform,
        workers=2,
        shard_bytes=8000,
        on_progress=seen.append,
    )
    assert sum(done.failures.values()) == 1
    assert sum(seen[-1].failures.values()) == 1
    assert seen[-1].documents == len(texts)
    assert penstock.open(tmp_path / "data")[: len(texts)]["length"].tolist() == [len(text) for text in texts]


def test_a_worker_that_reads_parquet_does_not_wait_for_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    transform = FunctionTransform("preparation.functions:is_pandas_there", types={"is_there": "bool"})
    prepare(tmp_path / "a.parquet", tmp_path / "data", transform=transform, workers=1)
    assert [bool(sample["is_there"]) for sample in penstock.open(tmp_path / "data")] == [False, False]


def test_a_task_that_kills_every_worker_stops_the_run_and_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 20, 1)
    transform = FunctionTransform("preparation.functions:suicidal", types=TYPES)
    before = children()
    told = r"killed by SIGKILL while preparing .*a\.jsonl.* \(out of memory\?\), like the 2 before it"
    with pytest.raises(WorkerDied, match=told):
        prepare(tmp_path / "a.jsonl", tmp_path / "data", transform=transform, workers=2)
    assert children() == before
    assert not (tmp_path / "data").exists()


@pytest.mark.stress
def test_the_name_of_a_file_that_kills_workers_is_safe_to_print(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(tmp_path / "a\x1b[2J.jsonl", 20, 1)
    transform = FunctionTransform("preparation.functions:suicidal", types=TYPES)
    with pytest.raises(WorkerDied, match=r"a\\x1b\[2J\.jsonl"):
        prepare(tmp_path / "a\x1b[2J.jsonl", tmp_path / "data", transform=transform, workers=1)
    told = [message for message in caplog.messages if message.endswith("trying again")]
    assert len(told) == 2
    assert all(r"a\x1b[2J.jsonl" in message and message.isprintable() for message in told)


def test_nothing_is_left_of_a_run(tmp_path: Path) -> None:
    make_corpus(tmp_path / "src", 3, 50)
    before, shared = children(), shared_memory()
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for turn in range(2):
        prepare(
            f"{tmp_path}/src/*.jsonl", tmp_path / str(turn), transform=Tokenize("bytes"), workers=2, shard_bytes=9000
        )
        if turn == 0:  # whatever libraries open once and keep
            descriptors = len(os.listdir("/proc/self/fd"))
            threads = threading.active_count()
    assert children() == before
    assert shared_memory() <= shared
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


def test_a_stopped_worker_is_named_with_its_task_and_how_to_let_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts, mark = write_jsonl(tmp_path / "a\x1b[2J.jsonl", 20, 1), tmp_path / "mark"
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(mark))
    monkeypatch.setattr(_failures, "FIRST_REPORT_SECONDS", 1.0)

    def let_go_on_when_told() -> None:
        assert wait_until(lambda: "it is stopped" in caplog.text)
        os.kill(int(mark.read_text()), signal.SIGCONT)

    helper = threading.Thread(target=let_go_on_when_told)
    helper.start()
    transform = FunctionTransform("preparation.functions:stopped_once", types=TYPES)
    done = prepare(tmp_path / "a\x1b[2J.jsonl", tmp_path / "data", transform=transform, workers=1)
    helper.join()
    assert (done.failures, len(penstock.open(tmp_path / "data"))) == ({}, len(texts))
    pid = mark.read_text()
    [said] = [message for message in caplog.messages if "it is stopped" in message]  # others may come when it goes on
    assert f"Worker 0 (pid {pid}) has been silent while preparing " in said
    assert said.isprintable()
    assert said.endswith(f"it is stopped; `kill -CONT {pid}` lets it go on.")


@pytest.mark.stress
def test_workers_prepare_where_there_is_no_proc(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 20, 1)
    command = ["-m", "penstock.cli", "prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "data"), "--workers", "2"]
    done = run_confined(["/proc=0"], command)
    assert done.returncode == 0, done.stderr
    assert len(penstock.open(tmp_path / "data")) == len(texts)


def test_a_script_without_a_main_guard_is_not_run_again_by_workers(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 20, 1)
    script = tmp_path / "script.py"
    script.write_text(
        "import penstock as p\n"
        "print('once')\n"
        f"p.prepare({str(tmp_path / 'a.jsonl')!r}, {str(tmp_path / 'data')!r},\n"
        "          transform=p.Tokenize('bytes'), workers=1)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr


def test_a_function_of_the_users_script_reaches_the_workers(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", 20, 1)
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\n"
        "import penstock as p\n"
        "def count(batch):\n"
        "    return {'length': np.array([len(str(text)) for text in batch['text']])}\n"
        "if __name__ == '__main__':\n"
        f"    p.prepare({str(tmp_path / 'a.jsonl')!r}, {str(tmp_path / 'data')!r},\n"
        "              transform=p.FunctionTransform(count), workers=1)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert penstock.open(tmp_path / "data")[: len(texts)]["length"].tolist() == [len(text) for text in texts]


def test_an_error_in_a_worker_arrives_with_its_traceback_and_where_it_was(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 20, 1)
    transform = FunctionTransform("preparation.functions:loses_its_connection", types=TYPES)
    with pytest.raises(FormatError, match="the user's own network") as caught:
        prepare(tmp_path / "a.jsonl", tmp_path / "data", transform=transform, workers=1)
    assert "in loses_its_connection" in str(caught.value.__cause__)
    assert "in worker 0, process" in caught.value.__notes__[-1]


def test_the_name_of_a_file_that_a_function_fails_on_is_safe_to_print(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a\x1b[2J.jsonl", 20, 1)
    transform = FunctionTransform("preparation.functions:fails_on_several", types=TYPES)
    with pytest.raises(TransformFailed, match="too many at once") as caught:
        prepare(tmp_path / "a\x1b[2J.jsonl", tmp_path / "data", transform=transform, workers=1)
    told = "".join(traceback.format_exception(caught.value))
    assert r"a\x1b[2J.jsonl" in told
    assert "\x1b" not in told


def test_workers_of_a_killed_run_end_whatever_they_are_doing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 20, 1)
    code = (
        "import penstock as p\n"
        f"p.prepare({str(tmp_path / 'a.jsonl')!r}, {str(tmp_path / 'data')!r}, workers=1,\n"
        "          transform=p.FunctionTransform('preparation.functions:keeps_the_gil', types={'length': 'int64'}))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PENSTOCK_TEST_MARK": str(tmp_path / "m"),
    }
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as owner:
        while not (tmp_path / "m").exists() and owner.poll() is None:
            time.sleep(0.05)
        (worker,) = psutil.Process(owner.pid).children()
        owner.kill()
    worker.wait(5)


def test_a_worker_leaves_to_the_user_what_the_user_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    write_jsonl(tmp_path / "a.jsonl", 1, 1)
    transform = FunctionTransform("preparation.functions:environment", types={"environment": "bytes"})

    def environment_of_a_worker(name: str) -> dict[str, str]:
        prepare(tmp_path / "a.jsonl", tmp_path / name, transform=transform, workers=1)
        found: dict[str, str] = json.loads(bytes(penstock.open(tmp_path / name)[0]["environment"]))
        return found

    given = environment_of_a_worker("first")
    assert (given["RAYON_NUM_THREADS"], given["MIMALLOC_PURGE_DELAY"]) == ("5", "-1")
    assert given["OMP_NUM_THREADS"] == str(usable_cpus())
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "10")
    assert environment_of_a_worker("second")["MIMALLOC_PURGE_DELAY"] == "10"
