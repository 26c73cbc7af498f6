"""Penstock and its peers in turns, on the same data, each in a process of its own.

A script describes a `Question` and ends with `run(QUESTION)`, which measures it and writes `results/<script>.json`.
Each peer has a process with the interpreter of its environment, so that a crash or a hang stays there. Between its
turns that process is stopped with all its workers: nothing is prefetched meanwhile, and nobody disturbs the others.

    parent   "2 workers" ->              SIGSTOP   "2 workers" ->
    child                set up, measure ->    ...             measure ->

Peers may live in an environment without Penstock: this module and what scripts have at the top import numpy at most.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
ENVIRONMENTS = HERE.parents[1] / ".venv-bench"
Turn = Callable[[], "float | dict[str, float]"]
"""Measures once: the question's first measure, or several by name."""


@dataclass(frozen=True)
class Peer:
    """One library, and the settings it is measured with, of which the best counts."""

    name: str
    start: Callable[[Path, Any], Turn]
    """Sets one of `arms` up, in the folder of the question; runs in the peer's process."""
    arms: tuple[str | float, ...] = ("",)
    """Settings in words; or numbers, if the question is about growth over them."""
    kind: Literal["peer", "ours", "limit"] = "peer"
    packages: tuple[str, ...] = ()
    """What is measured; their versions are printed."""
    environment: str = "common"


@dataclass(frozen=True)
class Question:
    """What is compared, and what the page says about it beside the numbers."""

    title: str
    measures: dict[str, str]
    """Units by name. More is better, except for seconds, milliseconds and bytes."""
    peers: tuple[Peer, ...]
    same: str
    """What all of them do: the data, the batch, what comes out."""
    limit: str
    """What bounds everybody."""
    why: str
    """Where the difference comes from."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Makes the data that all share; runs in this process."""
    over: str = ""
    """What numeric arms count: samples, workers."""
    rounds: int = 3
    limit_seconds: float = 30.0
    """After so long a turn has failed; the first has 120 seconds more, to convert the data."""
    is_fresh: bool = False
    """Each turn has a new process: for start-up and memory."""


def rate(batches: Iterator[Any], count: Callable[[Any], float], seconds: float = 0.5, num_warm: int = 24) -> float:
    """What comes per second. The first batches, which may have been there already, are left out."""
    for _ in range(num_warm):
        count(next(batches))
    total, number, begin = 0.0, 0, time.perf_counter()
    while number < 12 or time.perf_counter() - begin < seconds:
        total += count(next(batches))
        number += 1
    return total / (time.perf_counter() - begin)


def endless(epoch: Callable[[], Any]) -> Iterator[Any]:
    """One epoch after another."""
    while True:
        yield from epoch()


def family(process: int) -> list[int]:
    """A process and all that it started, in whatever group or session they are."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [process]
    for each in found:
        found += parents.get(each, [])
    return found


class _Process:
    """A peer's process, which runs only while it has its turn."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self.peer, self._errors = peer, tempfile.TemporaryFile()  # noqa: SIM115
        hidden = {"XDG_CACHE_HOME": str(folder / "caches"), "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
        for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
            hidden[name] = str(folder / "caches" / name)  # LitData empties what these name
        self._process = subprocess.Popen(
            [ENVIRONMENTS / peer.environment / "bin/python", sys.argv[0], "--peer", peer.name, "--folder", folder],
            env={**os.environ, **hidden, "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self.is_new = True

    def ask(self, arm: str | float, limit: float) -> dict[str, Any]:
        """One turn: {"value": …} or {"error": …}."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(arm).encode() + b"\n")
            stdin.flush()
        if not select.select([stdout], [], [], limit)[0]:
            self.close()
            return {"error": f"not done in {limit:.0f} s"}
        if not (line := stdout.readline()):
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines() or [""]
            return {"error": f"ended with {code}: {said[-1][-200:]}"}
        self._signal(signal.SIGSTOP)
        self.is_new = False
        return json.loads(line)

    def close(self) -> None:
        """End it with all its workers."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        started = family(self._process.pid)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3)
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _signal(self, number: int) -> None:
        for process in family(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def _serve_turns(question: Question, peer: Peer, folder: Path) -> None:
    """The child: answers each line of standard input with a turn. What the library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns: dict[Any, Turn] = {}
    for line in sys.stdin:
        arm = json.loads(line)
        try:
            if arm not in turns:
                turns[arm] = peer.start(folder, arm)
            value = turns[arm]()
            found = value if isinstance(value, dict) else {next(iter(question.measures)): value}
            answer: dict[str, Any] = {"value": found, "versions": {}}
        except (Exception, SystemExit) as error:  # noqa: BLE001
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300], "versions": {}}
        for package in ("numpy", *peer.packages):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                answer["versions"][package] = importlib.metadata.version(package)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def _measure(question: Question, folder: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Values of every arm in every round, or its error; and versions."""
    rows: dict[tuple[str, Any], dict[str, Any]] = {
        (peer.name, arm): {"peer": peer.name, "kind": peer.kind, "arm": arm, "values": {}, "error": None}
        for peer in question.peers
        for arm in peer.arms
    }
    versions: dict[str, str] = {}
    processes: dict[str, _Process] = {}
    with contextlib.ExitStack() as stack:
        for number in range(rounds):
            for peer in question.peers[:: 1 if number % 2 else -1]:
                for arm in peer.arms:
                    if (row := rows[peer.name, arm])["error"]:
                        continue
                    process = processes.get(peer.name)
                    if process is None or not process.is_alive or question.is_fresh:
                        process = processes[peer.name] = _Process(peer, folder)
                        stack.callback(process.close)
                    is_first = not row["values"]
                    answer = process.ask(arm, question.limit_seconds + (120 if is_first or process.is_new else 0))
                    if question.is_fresh:
                        process.close()
                    row["error"] = answer.get("error")
                    for name, value in answer.get("value", {}).items():
                        row["values"].setdefault(name, []).append(value)
                    versions |= answer.get("versions", {})
                    print(f"  {number + 1} {peer.name:<14} {arm!s:<24} {_shown(answer)}", flush=True)
    return list(rows.values()), dict(sorted(versions.items()))


def _shown(answer: dict[str, Any]) -> str:
    return answer.get("error") or ", ".join(f"{name} {value:,.4g}" for name, value in answer["value"].items())


def run(question: Question) -> None:
    """Measure, print and write the results; or, in a child, take turns."""
    parser = argparse.ArgumentParser(description=question.title)
    parser.add_argument("--rounds", type=int, default=question.rounds)
    parser.add_argument("--only", nargs="+", help="these peers; nothing is written")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        peer = next(peer for peer in question.peers if peer.name == given.peer)
        _serve_turns(question, peer, given.folder)
        return
    if given.only:
        chosen = tuple(peer for peer in question.peers if peer.name in given.only)
        question = Question(**{**vars(question), "peers": chosen})
    begin = time.time()
    print(question.title, flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as folder:
        question.prepare(Path(folder))
        rows, versions = _measure(question, Path(folder), given.rounds)
    write(question, rows, versions, time.time() - begin, is_kept=not given.only)


def write(
    question: Question, rows: list[dict[str, Any]], versions: dict[str, str], seconds: float, is_kept: bool
) -> None:
    """The results as a file beside the others, medians and ratios on the terminal."""
    sys.path.insert(0, str(HERE.parent))
    from _machine import describe_machine

    name = Path(sys.argv[0]).stem
    machine = {key: value for key, value in describe_machine().items() if key != "numpy"}
    found = {"question": name, "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds), "machine": machine}
    found |= {"versions": versions, "rows": rows}
    if is_kept:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(found, indent=1)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for measure, unit in question.measures.items():
        medians = {
            (r["peer"], r["arm"]): statistics.median(r["values"][measure]) for r in rows if measure in r["values"]
        }
        print(f"{question.title} {measure}, {unit}; {seconds:.0f} s in all")
        ours = max((v for r in rows if r["kind"] == "ours" and (v := medians.get((r["peer"], r["arm"])))), default=0)
        for (peer, arm), value in sorted(medians.items(), key=lambda item: -item[1]):
            print(f"  {peer:<14} {arm!s:<24} {value:>12,.4g}" + (f"  {value / ours:.3f} of ours" if ours else ""))
    for row in rows:
        if row["error"]:
            print(f"  {row['peer']} {row['arm']}: {row['error']}")
