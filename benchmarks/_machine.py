"""What every benchmark prints beside its figures: the machine, the versions, and the JSON line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock


def describe_machine(*packages: str) -> dict[str, Any]:
    """Processor, cores this process may use, Python, and versions of `packages`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {"penstock": penstock.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("numpy", *packages)}
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **versions}


def print_result(question: str, settings: dict[str, Any], figures: dict[str, Any], *packages: str) -> None:
    """A readable block, and the same as one line of JSON. Figures may be groups of figures."""
    machine = describe_machine(*packages)
    print(f"\n{question}")
    print("  " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    print("  " + ", ".join(f"{key}={value}" for key, value in settings.items()))
    for name, value in _flat(figures):
        print(f"  {name:<48} {value:,.3f}" if isinstance(value, float) else f"  {name:<48} {value}")
    print(json.dumps({"question": question, "machine": machine, "settings": settings, "figures": figures}))


def _flat(figures: dict[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{group}{name}, ")
        else:
            yield f"{group}{name}", value
