"""Functions to map. A module of its own, so that worker processes need not import torch and pytest for them."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np

import penstock


def fail_at_some(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Fails at every third sample."""
    if int(row["x"]) % 3 == 0:
        raise ValueError("a third sample")
    return {"x": row["x"], "draw": rng.integers(0, 1000)}


def draw_from_rng(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": row["x"], "noise": rng.random(3)}


def draw_from_globals(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {"x": row["x"], "noise": np.array([random.random(), np.random.random(), torch.rand(()).item()])}


def negate(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return batch | {"negative": -batch["input_ids"], "jitter": rng.random(2)}


def fail_at_20(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"] == 20:
        raise LookupError("row twenty is odd")  # the line that a traceback must show
    return row


def stop_at_20(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"] == 20:
        raise StopIteration
    return row


def die_at_20(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"] == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def be_slow(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    time.sleep(0.002)
    return row


def one_argument(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["x"] + 1}


@penstock.pure
def marked(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["x"] + 1}


def only_x(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": row["x"]}


def scale(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return batch | {"scaled": batch["input_ids"] * rng.integers(1, 5)}


def sleep_in_the_first_batch(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if row["x"] == 0:
        time.sleep(0.3)
    return {"x": row["x"]}


def stop_at_8(row: dict[str, Any]) -> dict[str, Any]:
    """Stops its process at row 8, until somebody lets it go on."""
    if row["x"] == 8:
        os.kill(os.getpid(), signal.SIGSTOP)
    return {"x": row["x"]}


def close_all_at_8(row: dict[str, Any]) -> dict[str, Any]:
    """Closes whatever its process has open, as programs that become daemons do, and goes on."""
    if row["x"] == 8:
        os.closerange(3, 1 << 16)
        time.sleep(60)
    return {"x": row["x"]}


def time_out(row: dict[str, Any]) -> dict[str, Any]:
    raise TimeoutError("the user's own network")
