"""States of streams: what of an epoch was read, by all parts or some, and what a state must be to go on from it.

A state has thirteen numbers for each part whose progress it holds: a process knows its own, a loader those of its
workers, and a list of states those of all. Parts as many as before go on where they stood. Any other number of parts
needs the progress of all, and shares what is left. Only then does a state say what was left when they began: about 40
bytes for each part before, and with a shuffle 10 for each chunk of 32 MB. The numbers of more than 16 parts are
compressed: 512 parts take 5 KB.
"""

import base64
import itertools
import json
import reprlib
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import StateError
from penstock.shapes import COUNT, Either, find_mismatch
from penstock.sources._stream_shares import Begun, Left, Progress, Recipe, everything, left_after

STATE_VERSION = 2
"""States of version 1 are read as well: each is of one part, and goes on in as many parts as before."""
_COMPRESSED_VERSION = 3
_MOST_PLAIN_PARTS = 16
_MOST_NUMBERS_BYTES = 64 << 20
_FIELDS = {"version", "facts", "writing", "num_parts", "epoch"}
_PLAIN = Either(str, int, float, bool, None, [Either(str, int)])
_READING = {str: Either(_PLAIN, {str: str})}  # options by name; one of them, `types`, maps columns to types
_FACTS = {str: Either(_PLAIN, _READING)}
_PLACE = Either(None, COUNT)
_MOST_PARTS = range(1, 1 << 24)
_FROM = {"record": COUNT, "skipped": COUNT, "piece": COUNT, "split": COUNT, "place": _PLACE}
_SHAPE_1 = {"part": _PLACE, "num_records": COUNT, "num_read": COUNT, "from": _FROM}
_BEGUN = (*(COUNT,) * 5, _PLACE, [(COUNT, COUNT, range(-1, COUNT.stop))])
_SHAPE = {
    "writing": str,
    "num_parts": Either(None, _MOST_PARTS),
    "epoch": COUNT,
    "left": Either(None, (_MOST_PARTS, [(COUNT, COUNT)], [(COUNT, COUNT)], [_BEGUN])),
    "at": [(*(COUNT,) * 9, _PLACE, _PLACE, COUNT, _PLACE)],
}


def start_state(recipe: Recipe, epoch: int) -> dict[str, Any]:
    """The state before the first record of an epoch; any part may start from it."""
    return state_of(recipe, recipe.writing, epoch, None, None, [])


def state_of(
    recipe: Recipe, writing: str, epoch: int, num_parts: int | None, left: Left | None, at: Sequence[Progress]
) -> dict[str, Any]:
    """Plain data; `left` is None if the parts began with the epoch."""
    facts = {"version": STATE_VERSION, "facts": recipe.facts, "writing": writing}
    return {**facts, "epoch": epoch, "num_parts": num_parts, "left": _plain(left), "at": _plain(at)}


def check_state(state: Any, recipe: Recipe) -> dict[str, Any]:
    """The state, or those of a list as one, in the present form.

    Raises:
        StateError: it is not one of this stream, or the states of a list do not go together. Warns if files were
            rewritten since.
    """
    if isinstance(state, list | tuple) and state:
        return _joined([check_state(each, recipe) for each in state])
    if not isinstance(state, Mapping) or not state.keys() >= _FIELDS:
        raise StateError(f"Not the state of a stream: {reprlib.repr(state)} lacks {', '.join(sorted(_FIELDS))}.")
    if type(state["version"]) is not int or not 1 <= state["version"] <= _COMPRESSED_VERSION:
        raise StateError(
            f"The state has version {reprlib.repr(state['version'])}; this Penstock reads versions 1 to "
            f"{_COMPRESSED_VERSION}."
        )
    _check(state, {"facts": _FACTS})
    if _facts_of(state, recipe) != recipe.facts:
        raise StateError(f"The state belongs to another stream. {_difference(state['facts'], recipe.facts)}")
    found = dict(state)
    if state["version"] != STATE_VERSION:
        found = _from_version_1(state) if state["version"] == 1 else _decompressed(state)
    _check(found, _SHAPE)
    _check_numbers(found, recipe)
    if state["writing"] != recipe.writing:
        warnings.warn(
            "The files of this stream were rewritten since the state was saved, with the same names and sizes. "
            "If their contents changed as well, the stream resumes at the wrong records.",
            stacklevel=3,
        )
    return found


def join_states(states: Sequence[dict[str, Any]], parts: Iterable[int] = ()) -> dict[str, Any]:
    """One state that holds the progress of all parts of several; those of `parts` that are in none have not begun."""
    state = _joined(states, parts)
    if len(state["at"]) <= _MOST_PLAIN_PARTS:
        return state
    numbers = json.dumps([state["left"], list(zip(*state["at"], strict=True))], separators=(",", ":"))
    text = base64.b85encode(zlib.compress(numbers.encode(), 9)).decode()
    return {**{name: state[name] for name in _FIELDS}, "version": _COMPRESSED_VERSION, "numbers": text}


def _decompressed(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        numbers = zlib.decompressobj().decompress(base64.b85decode(state["numbers"]), _MOST_NUMBERS_BYTES)
        left, columns = json.loads(numbers)
        at = [list(progress) for progress in zip(*columns, strict=True)]
    except (KeyError, TypeError, ValueError, RecursionError, zlib.error) as error:
        raise _damaged(f"its numbers cannot be read ({reprlib.repr(str(error))})") from error
    return {**{name: state[name] for name in _FIELDS}, "version": STATE_VERSION, "left": left, "at": at}


def _joined(states: Sequence[dict[str, Any]], parts: Iterable[int] = ()) -> dict[str, Any]:
    first = states[0]
    for name in ("epoch", "num_parts", "left"):
        if any(each[name] != first[name] for each in states):
            found = reprlib.repr([each[name] for each in states])
            raise StateError(f"States of different times cannot go on together: their {name} is {found}.")
    at = {part: list(Progress(part)) for part in parts}
    at |= {progress[0]: progress for each in states for progress in each["at"]}
    return {**first, "at": [at[part] for part in sorted(at)]}


def find_start(state: Mapping[str, Any], recipe: Recipe, part: int, num_parts: int) -> tuple[Left | None, Progress]:
    """What there was to share when the parts began, and how far this one is.

    Raises:
        StateError: the partition is another than the state's, and the state does not hold the progress of all parts.
    """
    left = None if state["left"] is None else _left(state["left"])
    at = [Progress(*each) for each in state["at"]]
    if state["num_parts"] in (None, num_parts):
        own = [each for each in at if each.part == part]
        if not own and state["num_parts"] is not None:
            raise _missing(state, f"this is part {part}")
        return left, own[0] if own else Progress(part)
    if [each.part for each in at] != list(range(state["num_parts"])):
        raise _missing(state, f"now there are {num_parts}")
    if left is None and any(each.num_read and each.last_piece is None for each in at):
        raise StateError(
            f"The state is of version 1, and was saved with {state['num_parts']} parts (ranks x workers), but now "
            f"there are {num_parts}. Go on with as many as before once; states saved then go on with any number."
        )
    return left_after(recipe, left or everything(recipe, len(at)), at, state["epoch"]), Progress(part)


def _missing(state: Mapping[str, Any], now: str) -> StateError:
    parts = ", ".join(str(each[0]) for each in itertools.islice(state["at"], 9))
    return StateError(
        f"The state holds part {parts} of {state['num_parts']} (ranks x workers), and {now}. To go on with other ranks "
        "or workers, load the states of all ranks as a list: load_state_dict([state, ...])."
    )


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _left(plain: Sequence[Any]) -> Left:
    num_parts, line, whole, begun = plain
    return Left(num_parts, line, whole, [Begun(*each) for each in begun])


def _from_version_1(state: Mapping[str, Any]) -> dict[str, Any]:
    _check(state, _SHAPE_1)
    if state["from"].keys() != _FROM.keys():
        raise _damaged(f"state['from'] has the keys {reprlib.repr(sorted(state['from']))}")
    known = {name: state[name] for name in _FIELDS - {"version"}}
    counts = (state["num_records"], state["num_read"], state.get("num_skipped", 0))
    at = (
        []
        if state["part"] is None
        else [[state["part"], 0, *counts, *(state["from"][name] for name in _FROM), None, 0, None]]
    )
    return {"version": STATE_VERSION, **known, "left": None, "at": at}


def _check(state: Mapping[str, Any], shape: Any) -> None:
    if wrong := find_mismatch(state, shape, "state"):
        raise _damaged(wrong)


def _check_numbers(state: Mapping[str, Any], recipe: Recipe) -> None:
    """At most a buffer of records is read ahead; a state that claims more would make us allocate for them."""
    left = _left(state["left"] or [1, [], [], []])
    for num_out, num_read in [(each[2], each[3]) for each in state["at"]] + [each[1:3] for each in left.begun]:
        if num_read > num_out + recipe.shuffle_buffer:
            raise _damaged(f"{num_read:,} records were read for {num_out:,} that were handed out")
    parts = [each[0] for each in state["at"]]
    if parts != sorted(set(parts)) or (parts and parts[-1] >= (state["num_parts"] or 0)):
        raise _damaged(f"it has progress of the parts {reprlib.repr(parts)} of {state['num_parts']}")
    for intervals, end in ((left.line, recipe.places[-1]), (left.whole, len(recipe.whole))):
        edges = [0, *itertools.chain.from_iterable(intervals), end]
        if edges != sorted(edges):
            raise _damaged(f"its ranges {reprlib.repr(intervals)} are not in order, or beyond {end:,}")
    if any(number >= len(recipe.files) for each in left.begun for number, _, _ in each.splits):
        raise _damaged(f"it names more than {len(recipe.files):,} files")


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
