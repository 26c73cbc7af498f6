"""Rows of a source as conversations: lists of messages, each with a role and what was said."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from penstock.transforms._chat_mask import Conversation, render_conversation
from penstock.transforms._chat_template import ChatTemplate, TemplateRefused
from penstock.transforms._rows import BadRows, find_column, is_arrow

if TYPE_CHECKING:
    from penstock.sources import Records


class _BadMessages(ValueError):
    """A value that is no conversation; `reason` is what it is counted by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def render_rows(
    records: Records, column: str, tools_column: str | None, template: ChatTemplate, with_mask: bool, bad: BadRows
) -> list[Conversation | None]:
    """Every conversation rendered; None where the row is bad."""
    tools = _list_values(records, tools_column) if tools_column else itertools.repeat(None, records.num_rows)
    rendered: list[Conversation | None] = []
    for place, (value, row_tools) in enumerate(zip(_list_values(records, column), tools, strict=True)):
        try:
            rendered.append(_render(value, row_tools, template, with_mask))
        except TemplateRefused as error:
            message = f"Column {column!r}: the chat template refuses this conversation: {error}."
            bad.add(place, "chat_template", message)
        except _BadMessages as error:
            bad.add(place, error.reason, f"Column {column!r} {error}")
        if len(rendered) == place:
            rendered.append(None)
    return rendered


def _render(value: Any, tools: Any, template: ChatTemplate, with_mask: bool) -> Conversation:
    messages = parse_messages(value)
    given = _parse_json(tools) if isinstance(tools, (str, bytes)) else _drop_missing(tools)
    conversation = render_conversation(template, messages, given, with_mask)
    try:
        conversation.text.encode()
    except UnicodeEncodeError:
        raise _BadMessages("invalid_utf8", "has half a surrogate pair, which no UTF-8 holds.") from None
    return conversation


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Messages of one row: a list of objects, or the same as a JSON string."""
    messages = _parse_json(value)
    if messages is None:
        raise _BadMessages("null", "is null.")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _BadMessages("wrong_type", f"holds {messages!r:.60}; a list of messages is needed.")
    if not messages:
        raise _BadMessages("empty", "is a conversation without messages.")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise _BadMessages("wrong_type", f"has a message without a role: {message!r:.80}")
        if all(each is None for key, each in message.items() if key != "role"):
            raise _BadMessages("empty", f"has a message without content: {message!r:.80}")
    is_filled = not isinstance(value, (str, bytes))
    return [_read_message(message, is_filled) for message in messages]


def _parse_json(value: Any) -> Any:
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _BadMessages("wrong_type", f"is text that is not JSON: {error}.") from None


def _read_message(message: dict[str, Any], is_filled: bool) -> dict[str, Any]:
    """The fields that it has. Templates ask whether the content is null, so that one stays."""
    known = {key: each for key, each in message.items() if each is not None or key == "content"}
    return {key: _drop_missing(each) for key, each in known.items()} if is_filled else known


def _drop_missing(value: Any) -> Any:
    """Arrow gives every object the fields of all of them, a tool's arguments included; a null is one that it lacks."""
    if isinstance(value, dict):
        return {key: _drop_missing(each) for key, each in value.items() if each is not None}
    return [_drop_missing(each) for each in value] if isinstance(value, list) else value


def _list_values(records: Records, name: str) -> list[Any]:
    column = find_column(records, name)
    values: list[Any] = column.to_pylist() if is_arrow(column) else column
    return values
