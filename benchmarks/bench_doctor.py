"""Does the doctor name the illness, and is the gain that it reports the gain of the fix applied by hand?

Runs the gallery in examples/doctor, every script once before any of them again: under the doctor, and, once for each
change that was advised, as it is and with the change applied by hand, in two processes that run in turns. Samples per
second are read from outside, with `--observe`. The scripts in examples/doctor/held_out were written after the doctor,
and nothing in it was tuned to them.

    python benchmarks/bench_doctor.py [--repetitions 5] [--seconds 40] [--minutes 30] [--results FILE] [names…]

What is in `--results` already is not run again, so that a run can be stopped and continued.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from _excerpts import make_excerpt
from _in_turns import compare
from _machine import describe_machine

from penstock.doctor import DoctorSettings, diagnose, recording_folder, run_script

GALLERY = Path(__file__).parents[1] / "examples" / "doctor"
SCRIPTS = {
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
    "healthy_compute": None,
    "healthy_fed": None,
    "healthy_tiny": None,
}
HELD_OUT = {
    "held_out/images_inline": "no-workers",
    "held_out/images_slow_few": "slow-samples",
    "held_out/images_fed": None,
    "held_out/tokens_padded": "padding",
    "held_out/tokens_restart": "workers-restart",
}


def fix_of(change: str) -> dict[str, Any]:
    """The options that a finding says to write; for other advice, a script's own fix."""
    try:
        call = ast.parse(change.replace("(..., ", "("), mode="eval").body
    except SyntaxError:
        return {"fix": True}
    if not isinstance(call, ast.Call):
        return {"fix": True}
    return {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}


class Results:
    """Rows that are written as they come, and found again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, row: dict[str, Any]) -> None:
        """Print a row, and keep it."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def find(self, **fields: Any) -> dict[str, Any] | None:
        """The first row with these values."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in fields.items())), None)


def examine(name: str, repetition: int, seconds: float, expected: str | None, keep: Path | None) -> dict[str, Any]:
    """One run under the doctor."""
    begin = time.monotonic()
    with recording_folder() as folder:
        settings = DoctorSettings(seconds=seconds)
        run = run_script([str(GALLERY / f"{name}.py")], settings, folder=folder, output_to_stderr=True)
    found = diagnose(run).to_json()
    first = found["findings"][0] if found["findings"] else {"id": None, "measured_gain": None, "error": None}
    if keep is not None and first["id"] == expected:
        (keep / f"{Path(name).name}.json").write_text(make_excerpt(run.recording))
    return {
        "script": name,
        "repetition": repetition,
        "is_right": first["id"] == expected,
        "found": [each["id"] for each in found["findings"]],
        "ceiling": None if found["ceiling"] is None else found["ceiling"]["ratio"],
        "change": first.get("change"),
        "gain": first["measured_gain"],
        "error": first["error"],
        "other_cores": found["machine"]["other_cores"],
        "seconds": time.monotonic() - begin,
    }


def summarise(rows: list[dict[str, Any]], scripts: dict[str, str | None]) -> dict[str, Any]:
    """How often it was right, and how far its gains are from those by hand."""
    runs = [row for row in rows if "is_right" in row and row["script"] in scripts]
    by_hand = {(row["script"], json.dumps(row["fix"])): row["by_hand"] for row in rows if "by_hand" in row}
    offs, worse = [], 0
    for row in runs:
        truth = by_hand.get((row["script"], json.dumps(fix_of(row["change"])))) if row["gain"] is not None else None
        if truth is not None:
            offs.append(abs(row["gain"] / truth - 1))
            worse += truth < 1
    summary: dict[str, Any] = {"runs": len(runs), "right": sum(row["is_right"] for row in runs)}
    per_script = {name: [row["is_right"] for row in runs if row["script"] == name] for name in scripts}
    summary["missed"] = {
        name: f"{found.count(False)} of {len(found)}" for name, found in per_script.items() if not all(found)
    }
    if offs:
        within = sum(off <= 0.25 for off in offs) / len(offs)
        summary |= {"gains": len(offs), "median_off": statistics.median(offs), "within_25_percent": within}
        summary["advised_though_worse_by_hand"] = worse
    return summary


def print_table(rows: list[dict[str, Any]], scripts: dict[str, str | None]) -> None:
    """The gains of the table in docs/doctor.md: medians over runs, as reported and by hand."""
    for name in scripts:
        runs = [row for row in rows if row["script"] == name and row.get("gain") is not None]
        gains = [statistics.median(row["gain"] for row in runs)] if runs else []
        gains += [row["by_hand"] for row in rows if row["script"] == name and "by_hand" in row][:1]
        print(f"| `{name}.py` | {' | '.join(f'{gain:.2f}' for gain in gains)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts; all of the gallery by default")
    parser.add_argument("--held-out", action="store_true", help="the scripts that the doctor was not written for")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=4, help="turns of three seconds as it is, and with the fix")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after this time")
    parser.add_argument("--keep", type=Path, help="a folder for recordings of runs that were diagnosed rightly")
    parser.add_argument("--results", type=Path, help="where rows are written, and found again")
    arguments = parser.parse_args()
    known = SCRIPTS | HELD_OUT
    chosen = arguments.names or (HELD_OUT if arguments.held_out else SCRIPTS)
    scripts = {name: known[name] for name in chosen}
    results, end = Results(arguments.results), time.monotonic() + 60 * arguments.minutes
    print(json.dumps(describe_machine("torch")))
    for repetition in range(arguments.repetitions):
        for name, expected in scripts.items():
            if time.monotonic() > end:
                continue
            row = results.find(script=name, repetition=repetition)
            if row is None:
                results.add(row := examine(name, repetition, arguments.seconds, expected, arguments.keep))
            fix = fix_of(row["change"]) if row["gain"] is not None else None
            if fix is not None and results.find(script=name, fix=fix) is None and time.monotonic() < end:
                results.add(
                    {"script": name, "fix": fix} | compare(GALLERY / f"{name}.py", fix, rounds=arguments.rounds)
                )
    print_table(results.rows, scripts)
    print(json.dumps(summarise(results.rows, scripts)))


if __name__ == "__main__":
    main()
