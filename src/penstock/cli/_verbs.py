"""The verbs of the command: what `penstock --help` prints, and where each lives.

A verb's module is imported when the verb is typed, not before: the table below is all that `--help` reads.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Verb:
    """One verb: its name, what it does in a line, and a command line to start from."""

    name: str
    help: str
    example: str

    def load(self) -> ModuleType:
        """Import the module that has the verb's arguments (`add_arguments`) and its work (`run`)."""
        return importlib.import_module(f"penstock.cli._{self.name}")


CONTENTS: dict[str, tuple[Verb, ...]] = {
    "Datasets": (
        Verb("prepare", "turn raw data into a dataset", "penstock prepare 'text/*.jsonl' corpus --tokenizer tok.json"),
        Verb("inspect", "show what is in a dataset", "penstock inspect corpus"),
        Verb(
            "trace",
            'show which documents are in a batch, for "my loss jumped"',
            "penstock trace plan.toml --step 4711 --decode tok.json",
        ),
        Verb("verify", "check every byte of a dataset against its checksums", "penstock verify corpus"),
    ),
    "Speed": (
        Verb(
            "doctor",
            "run a training script and find out why it waits for data",
            "penstock doctor --html report.html -- train.py --epochs 1",
        ),
        Verb("bench", "measure a loader by itself and with a training step", "penstock bench plan.toml"),
        Verb("tune", "find the loader options with which a job trains fastest", "penstock tune job.py"),
    ),
    "Where data is": (
        Verb("advise", "say how best to read a dataset on this machine", "penstock advise corpus --measure"),
        Verb("stage", "copy a dataset to this node's own storage", "penstock stage corpus $SCRATCH"),
    ),
    "Preprocessing on other machines": (
        Verb("serve", "serve the batches of a plan to training machines", "penstock serve plan.toml"),
        Verb("top", "show what servers are doing, live", "penstock top cpu1:8815 cpu2:8815"),
        Verb(
            "certificates",
            "make certificates for `penstock serve` and its clients",
            "penstock certificates tls cpu1 cpu2",
        ),
    ),
    "A first look": (
        Verb("demo", "show Penstock at work on this machine", "penstock demo"),
        Verb("completion", "have your shell complete this command", 'eval "$(penstock completion bash)"'),
    ),
}
VERBS = {verb.name: verb for verbs in CONTENTS.values() for verb in verbs}


def table_of_contents() -> str:
    """Every verb under its heading, with what it does and an example."""
    width = 2 + max(map(len, VERBS))
    indent = " " * (width + 2)
    sections = []
    for heading, verbs in CONTENTS.items():
        lines = [f"  {verb.name:<{width}}{verb.help}\n{indent}$ {verb.example}" for verb in verbs]
        sections.append("\n".join([f"{heading}:", *lines]))
    return "\n\n".join(sections)
