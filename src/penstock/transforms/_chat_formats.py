"""How fine-tuning datasets lay out a conversation, and the messages in it.

    messages      a list of {"role", "content", …}, or the same as JSON
    sharegpt      a list of {"from": "human" | "gpt" | …, "value"}
    prompt        a column of prompts and a column of completions: text, or lists of messages
    preference    two columns of answers, chosen and rejected, to a prompt in a third column; or two conversations
                  that begin alike, whose common beginning is the prompt

The model does not learn from a prompt: in the last two layouts only turns after it count.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.transforms._transform import BadValue

ChatFormat = Literal["messages", "sharegpt", "prompt", "preference"]
COMPLETION = "completion"
ANSWERS = ("chosen", "rejected")
_DEFAULT_COLUMN: dict[ChatFormat, str] = {"messages": "messages", "sharegpt": "conversations", "prompt": "prompt"}
_TELLING: dict[ChatFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "preference": ANSWERS,
    "prompt": ("prompt", COMPLETION),
}
"""Columns by which a layout is recognised."""
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
"""Speakers in ShareGPT files, and what chat templates call them."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""What datasets call the reasoning of a message; the first that there is counts."""
ASSISTANTS = frozenset(name for name, role in _SPEAKERS.items() if role == "assistant")


def guess_format(known: Collection[str], wrong: ChatFormat | None) -> str:
    """A sentence about the layout that rows with these fields are in, if it is not `wrong`; "" if they do not tell."""
    for format, columns in _TELLING.items():
        if format != wrong and all(name in known for name in columns):
            held = " and ".join(map(repr, columns))
            return f" The rows hold {held}: that is chat_format={format!r} (--chat-format {format})."
    return ""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages, of which the first `num_given` are a prompt."""

    messages: list[dict[str, Any]]
    num_given: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """Text that continues another text, without a template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class ChatLayout:
    """Which columns make a conversation, and which conversations a row holds."""

    format: ChatFormat
    column: str
    """The column of the conversation, or of the prompt; "" if conversations include their prompt."""

    @classmethod
    def of(cls, format: ChatFormat, column: str) -> ChatLayout:
        """The layout, with its usual column if none is given."""
        return cls(format, column or _DEFAULT_COLUMN.get(format, ""))

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the conversations in a row; "" if there is only one."""
        return ANSWERS if self.format == "preference" else ("",)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to read."""
        more = {"prompt": (COMPLETION,), "preference": ANSWERS}.get(self.format, ())
        return tuple(filter(None, (self.column, *more)))

    def read(self, row: Mapping[str, Any], side: str, *, as_text: bool) -> Dialogue | Continuation:
        """One conversation of a row; `as_text` if no template will render it.

        Raises:
            BadValue: the row holds something else.
        """
        if self.format == "messages":
            return Dialogue(parse_messages(self.column, row[self.column]))
        if self.format == "sharegpt":
            return Dialogue([_read_turn(self.column, turn) for turn in _list_of_objects(self.column, row[self.column])])
        if self.column:
            return _join(self.column, row[self.column], side or COMPLETION, row[side or COMPLETION], as_text)
        return _read_answer(row, side)


def _read_answer(row: Mapping[str, Any], side: str) -> Dialogue:
    """A conversation that includes its prompt: what chosen and rejected have in common."""
    if any(isinstance(row[name], str) and not row[name].lstrip().startswith("[") for name in ANSWERS):
        raise BadValue(
            "wrong_type",
            f"Column {side!r} holds text without a prompt; say which column holds the prompts: column='prompt' "
            "(--column prompt).",
        )
    first, second = (parse_messages(name, row[name]) for name in ANSWERS)
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    return Dialogue(first if side == ANSWERS[0] else second, common)


def _join(prompt_column: str, prompt: Any, column: str, completion: Any, as_text: bool) -> Dialogue | Continuation:
    if as_text:
        return Continuation(_as_text(prompt_column, prompt), _as_text(column, completion))
    given = _as_messages(prompt_column, prompt, "user")
    said = _as_messages(column, completion, "assistant")
    if said[0]["role"] in ("system", "user"):
        raise BadValue(
            "wrong_type",
            f"Column {column!r} begins with a message of the {said[0]['role']}, so it includes the prompt. Leave out "
            "the prompt's column (column='').",
        )
    return Dialogue([*given, *said], len(given))


def _as_text(column: str, value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if value is None:
        raise BadValue("null", f"Column {column!r} is null.")
    if not isinstance(value, str):
        raise BadValue(
            "wrong_type",
            f"Column {column!r} holds {value!r:.60}, not text. For messages, give a chat template: chat_template=True "
            "(--chat-template own).",
        )
    return value


def _as_messages(column: str, value: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(value, (str, bytes)):
        return [{"role": role, "content": _as_text(column, value)}]
    return parse_messages(column, value)


def parse_messages(column: str, value: Any) -> list[dict[str, Any]]:
    """Messages of one row: a list of objects, or the same as a JSON string."""
    messages = _list_of_objects(column, value)
    for message in messages:
        if not isinstance(message.get("role"), str):
            hint = " ShareGPT's layout is chat_format='sharegpt' (--chat-format sharegpt)." if "from" in message else ""
            raise BadValue("wrong_type", f"Column {column!r} has a message without a role: {message!r:.80}.{hint}")
        if all(each is None for key, each in message.items() if key != "role"):
            raise BadValue("empty", f"Column {column!r} has a message without content: {message!r:.80}")
    is_filled = not isinstance(value, (str, bytes))
    return [_read_message(message, is_filled) for message in messages]


def _read_turn(column: str, turn: Mapping[str, Any]) -> dict[str, Any]:
    speaker = turn.get("from")
    if speaker not in _SPEAKERS:
        known = ", ".join(_SPEAKERS)
        raise BadValue("wrong_type", f"Column {column!r} has a turn from {speaker!r}; the speakers are {known}.")
    if not isinstance(turn.get("value"), str):
        raise BadValue("empty", f"Column {column!r} has a turn without a value: {turn!r:.80}")
    return {"role": _SPEAKERS[speaker], "content": turn["value"]}


def _list_of_objects(column: str, value: Any) -> list[dict[str, Any]]:
    messages = parse_json(column, value)
    if messages is None:
        raise BadValue("null", f"Column {column!r} is null.")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadValue("wrong_type", f"Column {column!r} holds {messages!r:.60}, not a list of messages.")
    if not messages:
        raise BadValue("empty", f"Column {column!r} is a conversation without messages.")
    return messages


def parse_json(column: str, value: Any) -> Any:
    """Parse JSON text; any other value is returned unchanged."""
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadValue("wrong_type", f"Column {column!r} is text that is not JSON: {error}.") from None


def _read_message(message: dict[str, Any], is_filled: bool) -> dict[str, Any]:
    """The message without missing fields, except its content: templates test whether that is null."""
    known = {key: each for key, each in message.items() if each is not None or key == "content"}
    return _alias_reasoning({key: drop_missing(each) for key, each in known.items()} if is_filled else known)


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read, as transformers gives it."""
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def drop_missing(value: Any) -> Any:
    """Drop nulls: Arrow gives every object the fields of all of them, even a tool's arguments; null means missing."""
    if isinstance(value, dict):
        return {key: drop_missing(each) for key, each in value.items() if each is not None}
    return [drop_missing(each) for each in value] if isinstance(value, list) else value
