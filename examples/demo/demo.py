"""Show Penstock at work: prepare text, train on packed batches, kill the run, resume it, and run the doctor.

    python examples/demo/demo.py [--path FOLDER]        or `make demo`

Python's standard library -> a tokenizer trained on it -> prepare -> inspect -> a tiny GPT on packed batches
-> kill -9 -> resume, at the very next batch -> a table, compared with torch's DataLoader
-> the doctor, on a script that waits for its data and on one that Penstock feeds; its report stays when the demo ends.
Every number on the screen is measured here and now.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from corpus import BATCH, ROW, VOCABULARY, digest_of, make_plan, prepare, train_tokenizer

from penstock.cli import main as penstock_command
from penstock.doctor import Diagnosis, DoctorSettings, diagnose, make_page, recording_folder, run_script
from penstock.report import console, render_html, render_terminal

HERE = Path(__file__).parent
STEPS, KILL_AT, COMPARED = 60, 30, 16
DOCTOR_SECONDS = 10.0
"""Time for each script: about forty turns, of which the ceiling takes seven to thirteen."""


class Measured(NamedTuple):
    """One way of loading in the training loop."""

    tokens_per_second: float
    wait_milliseconds: float
    fill: float

    @classmethod
    def of(cls, lines: list[dict[str, Any]]) -> Measured:
        """What the training process printed, without the first steps, which start workers and warm caches."""
        steady = lines[5:]
        return cls(
            tokens_per_second=sum(line["targets"] for line in steady) / sum(line["seconds"] for line in steady),
            wait_milliseconds=1000 * statistics.median(line["wait"] for line in steady),
            fill=sum(line["targets"] for line in steady) / (len(steady) * BATCH * ROW),
        )


def show(folder: Path, report: Path) -> int:
    """Run the demo in `folder`; 0 if every part of it worked."""
    begin = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    say("1. A tokenizer", f"byte-level BPE of {VOCABULARY:,} tokens, trained on Python's own source files")
    tokenizer = train_tokenizer(folder / "tokenizer.json")
    say("2. Prepare", "the standard library's source files, split into documents at double blank lines")
    data = prepare(tokenizer, folder / "data")
    console().print()
    penstock_command(["inspect", str(data), "--sources"])
    say("3. Train", f"a GPT of a million parameters on packed rows of {ROW} tokens; killed with -9 at step {KILL_AT}")
    lines = train_until_killed(data, folder / "checkpoint.pt")
    say("4. Resume", "from the last checkpoint, in which the loader's state is a few numbers")
    saved = [line["saved"] for line in lines if "saved" in line][-1]
    resumed, is_right = resume(data, folder / "checkpoint.pt", saved)
    say("5. The same loop with torch's DataLoader and padding", f"{COMPARED} steps")
    padded = list(train(data, steps=COMPARED, loader="torch"))
    print_table(Measured.of(resumed), Measured.of(padded))
    first, last = lines[0]["loss"], statistics.mean(line["loss"] for line in resumed[-10:])
    fill = make_plan(data).ledger().fill
    console().print(f"Packing fills {fill:.3%} of all positions. Loss {first:.2f} -> {last:.2f}.")
    say("6. The doctor", "on a script that tokenizes files whenever it reads them, then on one that has them prepared")
    examine(folder, report)
    console().print(f"\nThe demo took {time.perf_counter() - begin:.0f} s. The doctor's report, for your browser:")
    sys.stdout.write(f"{report}\n")  # in one line, however long
    return 0 if is_right and last < first else 1


def say(title: str, text: str) -> None:
    """Print the heading of a part."""
    console().print(f"\n{title}", style="bold", end="")
    console().print(f"  {text}\n")


def train(
    data: Path, *, steps: int, loader: str = "penstock", checkpoint: Path | None = None
) -> Iterator[dict[str, Any]]:
    """What the training process prints, line by line; leaving the loop early kills it with SIGKILL."""
    command = [sys.executable, str(HERE / "train.py"), "--data", str(data), "--steps", str(steps), "--loader", loader]
    command += ["--checkpoint", str(checkpoint)] if checkpoint is not None else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own script
        assert process.stdout is not None
        try:
            for line in process.stdout:
                step = json.loads(line)
                if step["step"] % 20 == 0 or step["step"] == 1:
                    bar = "█" * round(6 * step["loss"])
                    console().print(f"   step {step['step']:>4}  loss {step['loss']:.3f}  {bar}")
                yield step
        finally:
            process.kill()


def train_until_killed(data: Path, checkpoint: Path) -> list[dict[str, Any]]:
    """Train up to the step at which the process is killed."""
    lines = []
    for line in train(data, steps=STEPS, checkpoint=checkpoint):
        lines.append(line)
        if line["step"] == KILL_AT:
            break
    console().print(f"   kill -9 at step {KILL_AT}")
    return lines


def resume(data: Path, checkpoint: Path, state: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the steps after the checkpoint, and whether the first batch is what the plan says about the state."""
    plan = make_plan(data)
    due = digest_of(plan.read_at(state["epoch"] * plan.num_rows + state["row"]))
    lines = list(train(data, steps=STEPS, checkpoint=checkpoint))
    is_right = lines[0]["batch"] == due
    verdict = "as the plan says" if is_right else f"but the plan says {due}"
    console().print(f"   state {state}\n   first batch after resuming: {lines[0]['batch']}, {verdict}")
    return lines, is_right


def print_table(ours: Measured, theirs: Measured) -> None:
    """Compare the two ways of loading."""
    from rich.table import Table

    table = Table(title=f"Rows of {ROW} tokens, {BATCH} per step, on this machine")
    for name in ("", "Penstock, packed", "torch DataLoader, padded"):
        table.add_column(name, justify="left" if not name else "right")
    both = (ours, theirs)
    table.add_row("target tokens per second", *(f"{each.tokens_per_second:,.0f}" for each in both))
    table.add_row("wait for data, per step", *(f"{each.wait_milliseconds:.2f} ms" for each in both))
    table.add_row("positions with a target", *(f"{each.fill:.1%}" for each in both))
    console().print()
    console().print(table)


def examine(folder: Path, report: Path) -> None:
    """Print what the doctor says about the two scripts, and write its page about the one that waits."""
    page = make_page(examined("texts", folder))
    report.write_text(render_html(page), encoding="utf-8")
    console().print(render_terminal(page))
    console().print(f"\nPrepared once, and loaded by Penstock: {examined('prepared', folder).verdict}")


def examined(data: str, folder: Path) -> Diagnosis:
    """What the doctor finds out about the script with this data."""
    words = [sys.executable, str(HERE / "examined.py"), data, str(folder)]
    with recording_folder() as recorded:
        run = run_script(words, DoctorSettings(seconds=DOCTOR_SECONDS), folder=recorded, output_to_stderr=True)
        return diagnose(run)


def lasting_file() -> Path:
    """A file for the report that outlives the demo."""
    with tempfile.NamedTemporaryFile(prefix="penstock-demo-", suffix=".html", delete=False) as file:
        return Path(file.name)


def main() -> int:
    """Parse the command line and run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="keep files here (default: temporary folder)")
    folder: Path | None = parser.parse_args().path
    if folder is not None:
        return show(folder, folder / "report.html")
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as temporary:
        return show(Path(temporary), lasting_file())


if __name__ == "__main__":
    sys.exit(main())
