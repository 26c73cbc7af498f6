"""Rows of a source as rendered conversations, with the characters that the assistant said.

    row -> messages (a list of objects, or the same as JSON) -> text, by the chat template -> spans of the assistant

What the assistant said is found in one of two ways. A template with generation marks says it. Without marks, turn i of
the assistant is what rendering turns 0..i adds to rendering 0..i-1 with a generation prompt. That is right only if
both are the beginning of the whole conversation, which is checked: a template that writes earlier turns
differently once later ones exist (dropping their reasoning, say) fails the check, and the conversation is refused.
The second way counts what the template writes after a turn (an end-of-turn token and its newline) as said, as the
training templates of TRL do, which put the end of a turn and its newline into their generation blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

from penstock.sources import Records
from penstock.transforms._byte_rows import find_column, is_arrow
from penstock.transforms._chat_template import TemplateRenderer
from penstock.transforms._special_tokens import REASON, has_mark, strip_marks
from penstock.transforms._template_sandbox import BEGIN_MARK, END_MARK, TemplateRefused
from penstock.transforms._transform import BadRows

_ASSISTANT = "assistant"
_MARK = re.compile(f"[{BEGIN_MARK}{END_MARK}]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation; `spans` are ranges of characters that the assistant said, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]
    ends_with_assistant: bool
    num_spelled: int = 0
    """Special tokens that its messages spell out."""


class _BadConversation(ValueError):
    """A value that is not a conversation; `reason` is the word it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def render_rows(
    records: Records, column: str, tools_column: str | None, renderer: TemplateRenderer, with_mask: bool, bad: BadRows
) -> list[Conversation | None]:
    """Every conversation rendered; None where the row is bad."""
    tools = _list_values(records, tools_column) if tools_column else itertools.repeat(None, records.num_rows)
    rendered: list[Conversation | None] = []
    for place, (value, row_tools) in enumerate(zip(_list_values(records, column), tools, strict=True)):
        try:
            rendered.append(_render(value, row_tools, renderer, with_mask))
        except TemplateRefused as error:
            message = f"Column {column!r}: the chat template refuses this conversation: {error}."
            bad.add(place, "chat_template", message)
        except _BadConversation as error:
            bad.add(place, error.reason, f"Column {column!r} {error}")
        if len(rendered) == place:
            rendered.append(None)
    return rendered


def _render(value: Any, tools: Any, renderer: TemplateRenderer, with_mask: bool) -> Conversation:
    messages = _parse_messages(value)
    given = _parse_json(tools) if isinstance(tools, (str, bytes)) else _drop_missing(tools)
    messages, given, num_spelled = _keep_apart(renderer, messages, given)
    conversation = _render_conversation(renderer, messages, given, with_mask)
    try:
        conversation.text.encode()
    except UnicodeEncodeError:
        raise _BadConversation("invalid_utf8", "has half a surrogate pair, which no UTF-8 holds.") from None
    return dataclasses.replace(conversation, num_spelled=num_spelled)


def _keep_apart(renderer: TemplateRenderer, messages: list[Any], tools: Any) -> tuple[list[Any], Any, int]:
    """The conversation with its special tokens defused, and how many it spells out; see `_special_tokens`."""
    guard, given = renderer.template.guard, [messages, tools]
    if guard is None:
        return messages, tools, 0
    if has_mark(given):
        raise _BadConversation("chat_template", "holds U+FDD2 or U+FDD3, which mark special tokens.")
    found = guard.find(given)
    if found and guard.policy == "refuse":
        raise _BadConversation(REASON, f"holds the special token {found[0]!r}.")
    defused = guard.defuse(given)
    if defused != given and strip_marks(renderer.render_plain(*defused)) != renderer.render_plain(messages, tools):
        shown = repr(found[0]) if found else "a part of one"
        raise TemplateRefused(
            f"it looks for special tokens in the messages, which hold {shown}; set special_tokens='allow' if the "
            "messages may control the model"
        )
    return defused[0], defused[1], len(found)


def _parse_messages(value: Any) -> list[dict[str, Any]]:
    """Messages of one row: a list of objects, or the same as a JSON string."""
    messages = _parse_json(value)
    if messages is None:
        raise _BadConversation("null", "is null.")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _BadConversation("wrong_type", f"holds {messages!r:.60}; a list of messages is needed.")
    if not messages:
        raise _BadConversation("empty", "is a conversation without messages.")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise _BadConversation("wrong_type", f"has a message without a role: {message!r:.80}")
        if all(each is None for key, each in message.items() if key != "role"):
            raise _BadConversation("empty", f"has a message without content: {message!r:.80}")
    is_filled = not isinstance(value, (str, bytes))
    return [_read_message(message, is_filled) for message in messages]


def _parse_json(value: Any) -> Any:
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _BadConversation("wrong_type", f"is text that is not JSON: {error}.") from None


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


def _render_conversation(
    renderer: TemplateRenderer, messages: list[dict[str, Any]], tools: list[Any] | None, with_mask: bool
) -> Conversation:
    """Text of a conversation and what the assistant said in it.

    Raises:
        TemplateRefused: it cannot be rendered, or nobody can say which part is the assistant's.
    """
    text = renderer.render(messages, tools)
    ends = messages[-1].get("role") == _ASSISTANT
    if not with_mask:
        return Conversation(text, (), ends)
    find = _find_marked if renderer.template.has_marks else _find_by_prefixes
    return Conversation(text, find(renderer, messages, tools, text), ends)


def _find_marked(
    renderer: TemplateRenderer, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
) -> tuple[tuple[int, int], ...]:
    marked = renderer.render(messages, tools, marked=True)
    if _MARK.search(text) or _MARK.sub("", marked) != text:
        raise TemplateRefused("its generation marks cannot be located: the marked text differs from the plain one")
    spans: list[tuple[int, int]] = []
    for count, mark in enumerate(_MARK.finditer(marked)):
        place = mark.start() - count
        if (mark.group() == BEGIN_MARK) != (count % 2 == 0):
            raise TemplateRefused("its generation marks are nested")
        if count % 2 == 0:
            begin = place
        elif place > begin:
            spans.append((begin, place))
    if not spans and any(message.get("role") == _ASSISTANT for message in messages):
        raise TemplateRefused("it marks nothing as generated, although the assistant has a turn")
    return tuple(spans)


def _find_by_prefixes(
    renderer: TemplateRenderer, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for turn, message in enumerate(messages):
        if message.get("role") != _ASSISTANT:
            continue
        # The last prefix is the whole conversation, rendered already.
        after = text if turn == len(messages) - 1 else renderer.render(messages[: turn + 1], tools)
        before = renderer.render(messages[:turn], tools, prompt=True)
        if not (text.startswith(after) and after.startswith(before) and len(before) < len(after)):
            raise TemplateRefused(
                f"it has no generation marks, and its rendering of turns 0 to {turn} is not the beginning of the "
                f"whole conversation, so the assistant's words cannot be told. Put {{% generation %}} and "
                f"{{% endgeneration %}} around them in the template, or set loss_mask=False"
            )
        spans.append((len(before), len(after)))
    return tuple(spans)
