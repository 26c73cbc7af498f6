"""Show Penstock at work: prepare text, train on packed batches, kill the run, resume it, and run the doctor."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli import _values
from penstock.cli._prepare import preparation_bar, show_prepared
from penstock.errors import MissingExtra
from penstock.report import console, print_json

if TYPE_CHECKING:
    from penstock.plan import Plan

ROW, BATCH, SEED = 256, 8, 7
_VOCABULARY, _EOS = 4096, "<|eos|>"
_STEPS, _KILL_AT, _COMPARED = 100, 40, 25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("--path", type=_values.path, default=None, help="keep files here (default: temporary folder)")


def run(arguments: argparse.Namespace) -> int:
    """0 if every part of the demo worked."""
    for package in ("torch", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(f"The demo needs {package}: pip install 'penstock[torch,text]'")
    import tempfile

    if arguments.path is not None:
        return _show(arguments.path, report=arguments.path / "report.html", as_json=arguments.json)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        return _show(Path(folder), report=None, as_json=arguments.json)


def make_plan(path: Path) -> Plan:
    """The plan that the demo trains on."""
    from penstock.plan import open_dataset

    return open_dataset(path).shuffle(seed=SEED).pack(ROW).batch(BATCH)


def digest_of(batch: dict[str, Any]) -> str:
    """A short name for the tokens of a batch."""
    import hashlib

    import numpy as np

    return hashlib.blake2b(np.ascontiguousarray(batch["input_ids"]).tobytes(), digest_size=6).hexdigest()


class _Measured(NamedTuple):
    """One way of loading in the training loop."""

    tokens_per_second: float
    wait_milliseconds: float
    fill: float


def _show(folder: Path, *, report: Path | None, as_json: bool) -> int:
    """Run the demo in `folder`. Every number on the screen is measured here and now.

    Python's standard library -> a tokenizer trained on it -> prepare -> inspect -> a tiny GPT on packed
    batches -> kill -9 -> resume, at the very next batch -> a table, compared with torch's DataLoader -> the doctor,
    on a script that waits for its data and on one that Penstock feeds; its report stays when the demo ends
    """
    from penstock.cli._demo_doctor import examine
    from penstock.cli._description import describe
    from penstock.cli._description_output import print_description

    folder.mkdir(parents=True, exist_ok=True)
    say = (lambda *_: None) if as_json else _say
    begin = time.perf_counter()
    say("1. A tokenizer", f"byte-level BPE of {_VOCABULARY:,} tokens, trained on Python's own source files")
    tokenizer = _train_tokenizer(folder / "tokenizer.json")
    say("2. Prepare", "the standard library's source files, split into documents at double blank lines")
    data = _prepare(tokenizer, folder / "data", as_json=as_json)
    if not as_json:
        print_description(describe(data, num_samples=1, looks_at_sources=True))
    say("3. Train", f"a GPT of a million parameters on packed rows of {ROW} tokens; killed with -9 at step {_KILL_AT}")
    lines = _train_until_killed(data, folder / "checkpoint.pt", as_json=as_json)
    say("4. Resume", "from the last checkpoint, in which the loader's state is a few numbers")
    resumed, is_right = _resume(data, folder / "checkpoint.pt", as_json=as_json)
    say("5. The same loop with torch's DataLoader and padding", f"{_COMPARED} steps")
    padded = list(_run(data, steps=_COMPARED, loader="torch", as_json=as_json))
    result = _result(data, lines, resumed, padded, is_right)
    if not as_json:
        _print_table(result)
    say("6. The doctor", "on a script that tokenizes files whenever it reads them, then on one that has them prepared")
    result["doctor"] = examine(folder, report, as_json=as_json)
    result["seconds"] = time.perf_counter() - begin
    if as_json:
        print_json(result)
    else:
        console().print(f"\nThe demo took {result['seconds']:.0f} s. The doctor's report, for your browser:")
        sys.stdout.write(result["doctor"]["report"] + "\n")  # in one line, however long
    return 0 if is_right and result["loss"]["last"] < result["loss"]["first"] else 1


def _say(title: str, text: str) -> None:
    console().print(f"\n{title}", style="bold", end="")
    console().print(f"  {text}\n")


def source_files() -> list[Path]:
    """Python's standard library: text that is on every machine."""
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts and file.stat().st_size]


def _train_tokenizer(path: Path) -> Path:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (file.read_text(errors="replace") for file in source_files()[::4])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return path


def _prepare(tokenizer: Path, destination: Path, *, as_json: bool) -> Path:
    from penstock.preparation import prepare
    from penstock.sources import SourceOptions
    from penstock.transforms import Tokenize

    with contextlib.nullcontext() if as_json else preparation_bar() as on_progress:
        prepared = prepare(
            [str(file) for file in source_files()],
            destination,
            reading=SourceOptions(format="text", text_unit="separator", separator="\n\n\n"),
            transform=Tokenize(str(tokenizer), append_eos=_EOS),
            pack=[ROW],
            on_error="skip",  # the standard library contains files that are not UTF-8, on purpose
            on_progress=on_progress,
        )
    if not as_json:
        show_prepared(prepared, as_json=False)
        console().print()
    return destination


def _run(
    data: Path,
    *,
    steps: int,
    as_json: bool,
    loader: str = "penstock",
    checkpoint: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """What the training process prints, line by line; leaving the loop early kills it with SIGKILL."""
    import subprocess

    command = [sys.executable, "-m", "penstock.cli._demo_train", "--data", str(data), "--steps", str(steps)]
    command += ["--vocabulary", str(_VOCABULARY), "--loader", loader]
    command += ["--checkpoint", str(checkpoint)] if checkpoint is not None else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own module
        assert process.stdout is not None
        try:
            for line in process.stdout:
                step = json.loads(line)
                if not as_json:
                    _show_step(step)
                yield step
        finally:
            process.kill()


def _train_until_killed(data: Path, checkpoint: Path, *, as_json: bool) -> list[dict[str, Any]]:
    lines = []
    for line in _run(data, steps=_STEPS, checkpoint=checkpoint, as_json=as_json):
        lines.append(line)
        if line["step"] == _KILL_AT:
            break
    if not as_json:
        console().print(f"   kill -9 at step {_KILL_AT}")
    return lines


def _resume(data: Path, checkpoint: Path, *, as_json: bool) -> tuple[list[dict[str, Any]], bool]:
    """Resume from the checkpoint; return the steps, and whether the first batch is the one that the plan says."""
    import torch

    state = torch.load(checkpoint, weights_only=True)["data"]
    plan = make_plan(data)
    due = digest_of(plan.read_at(state["epoch"] * plan.num_rows + state["row"]))
    lines = list(_run(data, steps=_STEPS, checkpoint=checkpoint, as_json=as_json))
    is_right = lines[0]["batch"] == due
    if not as_json:
        verdict = "as the plan says" if is_right else f"but the plan says {due}"
        console().print(f"   state {state}\n   first batch after resuming: {lines[0]['batch']}, {verdict}")
    return lines, is_right


def _show_step(line: dict[str, Any]) -> None:
    if line["step"] % 20 == 0 or line["step"] == 1:
        bar = "█" * round(6 * line["loss"])
        console().print(f"   step {line['step']:>4}  loss {line['loss']:.3f}  {bar}")


def _measure(lines: list[dict[str, Any]]) -> _Measured:
    import statistics

    steady = lines[5:]  # the first steps start workers and warm caches
    return _Measured(
        tokens_per_second=sum(line["targets"] for line in steady) / sum(line["seconds"] for line in steady),
        wait_milliseconds=1000 * statistics.median(line["wait"] for line in steady),
        fill=sum(line["targets"] for line in steady) / (len(steady) * BATCH * ROW),
    )


def _result(
    data: Path, lines: list[dict[str, Any]], resumed: list[dict[str, Any]], padded: list[dict[str, Any]], is_right: bool
) -> dict[str, Any]:
    import statistics

    ours, theirs = _measure(resumed), _measure(padded)
    ledger = make_plan(data).ledger()
    return {
        "resumed_at_the_right_batch": is_right,
        "loss": {"first": lines[0]["loss"], "last": statistics.mean(line["loss"] for line in resumed[-10:])},
        "fill": ledger.fill,
        "targets_per_second": {"penstock": ours.tokens_per_second, "torch": theirs.tokens_per_second},
        "wait_milliseconds": {"penstock": ours.wait_milliseconds, "torch": theirs.wait_milliseconds},
        "share_of_places_with_a_target": {"penstock": ours.fill, "torch": theirs.fill},
    }


def _print_table(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"Rows of {ROW} tokens, {BATCH} per step, on this machine")
    for name in ("", "Penstock, packed", "torch DataLoader, padded"):
        table.add_column(name, justify="left" if not name else "right")
    speed, wait, share = (
        result[key] for key in ("targets_per_second", "wait_milliseconds", "share_of_places_with_a_target")
    )
    table.add_row("target tokens per second", f"{speed['penstock']:,.0f}", f"{speed['torch']:,.0f}")
    table.add_row("wait for data, per step", f"{wait['penstock']:.2f} ms", f"{wait['torch']:.2f} ms")
    table.add_row("positions with a target", f"{share['penstock']:.1%}", f"{share['torch']:.1%}")
    out = console()
    out.print()
    out.print(table)
    loss = result["loss"]
    out.print(f"Packing fills {result['fill']:.3%} of all positions. Loss {loss['first']:.2f} -> {loss['last']:.2f}.")
