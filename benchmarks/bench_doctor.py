"""Does the doctor name the illness, and is the gain that it reports the gain of the fix applied by hand?

Runs the gallery in examples/doctor: each ill script under the doctor, then as it is and with the doctor's own advice
applied by hand, in turns, in runs of their own. Samples per second are read from outside, with `--observe`.

    python benchmarks/bench_doctor.py [--repetitions 5] [--seconds 40] [names…]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _machine import describe_machine

from penstock.diagnosis import DoctorSettings, recording_folder, run_script
from penstock.metrics import EventKind

GALLERY = Path(__file__).parents[1] / "examples" / "doctor"
ILL = {
    "no_workers": "no-workers",
    "too_many_workers": "too-many-workers",
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
_SKIPPED_SECONDS = 1.0


def diagnose(name: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock.cli", "doctor", "--json", "--seconds", str(seconds), "--"]
    done = subprocess.run([*command, str(GALLERY / f"{name}.py")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fix_of(change: str) -> dict[str, Any]:
    """The options that a finding says to write; for other advice, a script's own fix."""
    try:
        call = ast.parse(change.replace("(..., ", "("), mode="eval").body
    except SyntaxError:
        return {"fix": True}
    if not isinstance(call, ast.Call):
        return {"fix": True}
    return {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}


def rate_of(name: str, fix: dict[str, Any], seconds: float) -> float:
    """Samples per second of a script by itself."""
    os.environ["FIX"] = json.dumps(fix)
    with recording_folder() as folder:
        settings = DoctorSettings(seconds=seconds, observe=True)
        run = run_script([str(GALLERY / f"{name}.py")], settings, folder=folder, output_to_stderr=True)
    del os.environ["FIX"]
    events = run.recording.events
    steps = events[events["kind"] == EventKind.NEXT]
    steps = steps[steps["start"] > steps["start"][0] + 1e9 * _SKIPPED_SECONDS]
    return float(steps["value"][:-1].sum() / ((steps["start"][-1] - steps["start"][0]) / 1e9))


def gain_by_hand(name: str, fix: dict[str, Any], seconds: float) -> float:
    pairs = [(rate_of(name, {}, seconds), rate_of(name, fix, seconds)) for _ in range(2)]
    return statistics.geometric_mean(fixed / plain for plain, fixed in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*ILL, *HEALTHY])
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--by-hand-seconds", type=float, default=6)
    arguments = parser.parse_args()
    print(json.dumps(describe_machine("torch")))
    rows = []
    for name in arguments.names:
        for _ in range(arguments.repetitions):
            found = diagnose(name, arguments.seconds)
            first = found["findings"][0] if found["findings"] else {"id": None, "measured_gain": None, "error": None}
            row = {"script": name, "is_right": first["id"] == ILL.get(name), "found": first["id"]}
            row |= {"ceiling": found["ceiling"], "gain": first["measured_gain"], "error": first["error"]}
            if first["measured_gain"] is not None:
                row["change"] = first["change"]
                row["by_hand"] = gain_by_hand(name, fix_of(first["change"]), arguments.by_hand_seconds)
                row["off"] = first["measured_gain"] / row["by_hand"] - 1
            rows.append(row)
            print(json.dumps(row), flush=True)
    offs = sorted(abs(row["off"]) for row in rows if "off" in row)
    summary = {"right": sum(row["is_right"] for row in rows), "of": len(rows)}
    if offs:
        within = sum(off <= 0.25 for off in offs) / len(offs)
        summary |= {"median_off": statistics.median(offs), "within_25_percent": within}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
