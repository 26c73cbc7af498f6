"""What a saved state must agree with before anyone goes on from it."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Mapping
from typing import Any

from penstock.errors import StateError
from penstock.shapes import COUNT, Either, misfit
from penstock.streams._recipe import Recipe

STATE_VERSION = 1
_FIELDS = {"version", "facts", "writing", "part", "num_parts", "epoch", "num_records", "num_read", "from"}
_START = {"record": 0, "skipped": 0, "piece": 0, "split": 0, "place": None}
_PLAIN = Either(str, int, float, bool, None, [Either(str, int)])
_READING = {str: Either(_PLAIN, {str: str})}  # an option by its name: one of them, `types`, names columns
_FACTS = {str: Either(_PLAIN, _READING)}
_SHAPE = {
    "writing": str,
    "part": Either(None, COUNT),
    "num_parts": Either(None, COUNT),
    "epoch": COUNT,
    "num_records": COUNT,
    "num_read": COUNT,
    "from": {name: Either(None, COUNT) if first is None else COUNT for name, first in _START.items()},
}


def start_state(recipe: Recipe, epoch: int) -> dict[str, Any]:
    """The state before the first record of an epoch; any part may begin with it."""
    return {
        "version": STATE_VERSION,
        "facts": recipe.facts,
        "writing": recipe.writing,
        "part": None,
        "num_parts": None,
        "epoch": epoch,
        "num_records": 0,
        "num_read": 0,
        "num_skipped": 0,
        "from": dict(_START),
    }


def check_state(state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise `StateError` when the state is not one of this stream; warn when files were written again since."""
    if not isinstance(state, Mapping) or not state.keys() >= _FIELDS:
        raise StateError(f"Not the state of a stream: {reprlib.repr(state)} lacks {', '.join(sorted(_FIELDS))}.")
    if type(state["version"]) is not int or state["version"] != STATE_VERSION:
        raise StateError(
            f"The state has version {reprlib.repr(state['version'])}; this Penstock reads version {STATE_VERSION}."
        )
    _check(state, {"facts": _FACTS})
    if _facts_of(state, recipe) != recipe.facts:
        raise StateError(f"The state belongs to another stream. {_difference(state['facts'], recipe.facts)}")
    _check(state, _SHAPE)
    _check_counts(state, recipe.shuffle_buffer)
    if state["writing"] != recipe.writing:
        warnings.warn(
            "The files of this stream were written again since the state was saved, with the same names and sizes. "
            "If their content changed as well, the stream goes on at the wrong records.",
            stacklevel=3,
        )


def check_part(state: Mapping[str, Any], part: int, num_parts: int) -> None:
    """Raise `StateError` when the state is of another part (rank and worker), or of another number of them."""
    if state["part"] is None:
        return
    if state["num_parts"] != num_parts:
        raise StateError(
            f"The state was saved with the files split into {state['num_parts']} parts (ranks x workers), and now "
            f"there are {num_parts}. A stream goes on with as many ranks and workers as before; "
            "`penstock.prepare` makes data that can be split anew at any time."
        )
    if state["part"] != part:
        raise StateError(
            f"The state is that of part {state['part']} of {num_parts}, and this is part {part}. "
            "Each rank, and each worker, loads the state that it saved."
        )


def _check(state: Mapping[str, Any], shape: Any) -> None:
    if wrong := misfit(state, shape, "state"):
        raise _damaged(wrong)


def _check_counts(state: Mapping[str, Any], shuffle_buffer: int) -> None:
    """At most a buffer of records is read ahead: what a state says more of would be taken from memory."""
    num_out, num_read = state["num_records"], state["num_read"]
    if num_read > num_out + shuffle_buffer:
        raise _damaged(f"{num_read:,} records were read for {num_out:,} that were handed out")
    if state["from"].keys() != _START.keys():
        raise _damaged(f"state['from'] has the keys {reprlib.repr(sorted(state['from']))}")


def _damaged(wrong: str) -> StateError:
    return StateError(f"The state is damaged: {wrong}. Go on from another one.")


def _facts_of(state: Mapping[str, Any], recipe: Recipe) -> Any:
    """What the stream was. One that stops at a bad record may go on without it: up to there both are the same."""
    facts = state["facts"]
    stops = isinstance(facts, Mapping) and facts.get("on_error") == "raise"
    return {**facts, "on_error": recipe.on_error} if stops else facts


def _difference(theirs: Any, ours: Mapping[str, Any]) -> str:
    names = [name for name in ours if not isinstance(theirs, Mapping) or theirs.get(name) != ours[name]]
    told = "; ".join(f"{name} was {_told(theirs, name)}, is {ours[name]}" for name in names)
    return f"Different: {told}."


def _told(theirs: Any, name: str) -> Any:
    return theirs.get(name, "unknown") if isinstance(theirs, Mapping) else "unknown"
