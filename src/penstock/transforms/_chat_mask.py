"""Which characters of a rendered conversation the assistant said.

Two ways, and nothing else. A template with generation marks says it. Without marks, turn i of the assistant is
what rendering turns 0..i has beyond rendering 0..i-1 with a generation prompt: true only if both are the
beginning of the whole conversation, which is checked. A template that writes earlier turns differently
once later ones exist (dropping their reasoning, say) fails the check, and the conversation is refused.

The second way counts what the template writes behind a turn (an end-of-turn token and its newline) as said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from penstock.transforms._chat_template import BEGIN_MARK, END_MARK, ChatTemplate, TemplateRefused

ASSISTANT = "assistant"
_MARK = re.compile(f"[{BEGIN_MARK}{END_MARK}]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation; `spans` are ranges of characters that the assistant said, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]
    ends_with_assistant: bool


def render_conversation(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, with_mask: bool
) -> Conversation:
    """Text of a conversation and what the assistant said in it.

    Raises:
        TemplateRefused: it cannot be rendered, or nobody can say which part is the assistant's.
    """
    text = template.render(messages, tools)
    ends = messages[-1].get("role") == ASSISTANT
    if not with_mask:
        return Conversation(text, (), ends)
    find = _find_marked if template.has_marks else _find_by_prefixes
    return Conversation(text, find(template, messages, tools, text), ends)


def _find_marked(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
) -> tuple[tuple[int, int], ...]:
    marked = template.render(messages, tools, marked=True)
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
    if not spans and any(message.get("role") == ASSISTANT for message in messages):
        raise TemplateRefused("it marks nothing as generated, although the assistant has a turn")
    return tuple(spans)


def _find_by_prefixes(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for turn, message in enumerate(messages):
        if message.get("role") != ASSISTANT:
            continue
        # The last prefix is the whole conversation, rendered already.
        after = text if turn == len(messages) - 1 else template.render(messages[: turn + 1], tools)
        before = template.render(messages[:turn], tools, prompt=True)
        if not (text.startswith(after) and after.startswith(before) and len(before) < len(after)):
            raise TemplateRefused(
                f"it has no generation marks, and its rendering of turns 0 to {turn} is not the beginning of the "
                f"whole conversation, so the assistant's words cannot be told. Put {{% generation %}} and "
                f"{{% endgeneration %}} around them in the template, or set loss_mask=False"
            )
        spans.append((len(before), len(after)))
    return tuple(spans)
