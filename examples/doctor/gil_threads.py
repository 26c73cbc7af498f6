"""Ill: a transform in pure Python, run by threads of the training process, which share one interpreter lock."""

import json
import os
import time

import numpy as np

import penstock

OPTIONS = {"workers": "thread", "num_workers": 2} | json.loads(os.environ.get("FIX", "{}"))


@penstock.pure
def spell_out(sample, rng):
    total = 0
    for place in range(12_000):
        total = (31 * total + place) % 65_521
    return {"x": sample["x"] + total}


if __name__ == "__main__":
    plan = penstock.from_arrays({"x": np.arange(100_000)}).shuffle(seed=1).map(spell_out).batch(16)
    for _batch in penstock.DataLoader(plan, **OPTIONS):
        time.sleep(0.004)  # the accelerator computes
