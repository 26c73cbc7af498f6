"""Excerpts of the doctor's recordings: small JSON files, without the machine's paths, that give the same findings.

    {"facts": [{"fact": "loader", …}, …], "machine": {"other_cores": 0.1, …}, "events": "<deflated, in base64>"}

`bench_doctor.py --keep` writes them, `tests/doctor/test_recordings.py` reads them.
"""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np

from penstock.doctor import Recording
from penstock.machine import no_events

_MOST_OF_A_KIND = 400
_LEFT_OUT = ("process", "not-saved")


def make_excerpt(recording: Recording) -> str:
    """The facts, and the first baseline events of each kind."""
    events, loader = recording.events, recording.loader
    mine = events[(events["trial"] == 0) & (events["loader"] == (0 if loader is None else loader["loader"]))]
    kept = [mine[mine["kind"] == kind][:_MOST_OF_A_KIND] for kind in np.unique(mine["kind"])]
    chosen = np.concatenate(kept) if kept else no_events()
    facts = [fact for fact in recording.facts if fact["fact"] not in _LEFT_OUT]
    packed = zlib.compress(chosen[np.argsort(chosen["start"], kind="stable")].tobytes(), 9)
    text = base64.b64encode(packed).decode()
    return json.dumps({"facts": facts, "machine": dict(recording.machine), "events": text}) + "\n"


def read_excerpt(text: str) -> Recording:
    """The recording that an excerpt was made from, as far as it was kept."""
    saved = json.loads(text)
    events = np.frombuffer(zlib.decompress(base64.b64decode(saved["events"])), no_events().dtype)
    return Recording(facts=saved["facts"], events=events, machine=saved["machine"])
