"""What a saved state must agree with before a stream resumes from it."""

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
_READING = {str: Either(_PLAIN, {str: str})}  # options by name; one of them, `types`, maps columns to types
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
    """The state before the first record of an epoch; any part may start from it."""
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
    """Raise `StateError` if the state is not one of this stream; warn if files were rewritten since."""
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
            "The files of this stream were rewritten since the state was saved, with the same names and sizes. "
            "If their contents changed as well, the stream resumes at the wrong records.",
            stacklevel=3,
        )


def check_part(state: Mapping[str, Any], part: int, num_parts: int) -> None:
    """Raise `StateError` if the state is that of another part (rank and worker), or the number of parts differs."""
    if state["part"] is None:
        return
    if state["num_parts"] != num_parts:
        raise StateError(
            f"The state was saved with the files split into {state['num_parts']} parts (ranks x workers), but now "
            f"there are {num_parts}. A stream resumes with as many ranks and workers as before; "
            "data made by `penstock.prepare` can be split differently at any time."
        )
    if state["part"] != part:
        raise StateError(
            f"The state is that of part {state['part']} of {num_parts}, but this is part {part}. "
            "Each rank and each worker must load the state that it saved."
        )


def _check(state: Mapping[str, Any], shape: Any) -> None:
    if wrong := misfit(state, shape, "state"):
        raise _damaged(wrong)


def _check_counts(state: Mapping[str, Any], shuffle_buffer: int) -> None:
    """At most a buffer of records is read ahead; a state that claims more would make us allocate for them."""
    num_out, num_read = state["num_records"], state["num_read"]
    if num_read > num_out + shuffle_buffer:
        raise _damaged(f"{num_read:,} records were read for {num_out:,} that were handed out")
    if state["from"].keys() != _START.keys():
        raise _damaged(f"state['from'] has the keys {reprlib.repr(sorted(state['from']))}")


def _damaged(wrong: str) -> StateError:
    return StateError(f"The state is damaged: {wrong}. Resume from another one.")


def _facts_of(state: Mapping[str, Any], recipe: Recipe) -> Any:
    """What the stream was. One that stopped at a bad record may resume by skipping it: until then both are the same."""
    facts = state["facts"]
    stops = isinstance(facts, Mapping) and facts.get("on_error") == "raise"
    return {**facts, "on_error": recipe.on_error} if stops else facts


def _difference(theirs: Any, ours: Mapping[str, Any]) -> str:
    names = [name for name in ours if not isinstance(theirs, Mapping) or theirs.get(name) != ours[name]]
    changes = "; ".join(f"{name} was {_value_in(theirs, name)}, is {ours[name]}" for name in names)
    return f"Different: {changes}."


def _value_in(theirs: Any, name: str) -> Any:
    return theirs.get(name, "unknown") if isinstance(theirs, Mapping) else "unknown"
