"""Rows of a source as conversations: lists of messages, each with a role and what was said."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from penstock.preparation._chat_mask import Conversation, render_conversation
from penstock.preparation._chat_template import ChatTemplate, TemplateRefused
from penstock.preparation._rows import BadRows, find_column, is_arrow

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
    given = None if tools is None else _parse_json(tools)
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
    return [_drop_missing(message) for message in messages]


def _parse_json(value: Any) -> Any:
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _BadMessages("wrong_type", f"is text that is not JSON: {error}.") from None


def _drop_missing(message: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives every message every field; to a template, a field that is null is not the same as none."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _list_values(records: Records, name: str) -> list[Any]:
    column = find_column(records, name)
    values: list[Any] = column.to_pylist() if is_arrow(column) else column
    return values
