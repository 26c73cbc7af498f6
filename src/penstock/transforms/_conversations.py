"""Rows of a source as rendered conversations, with the characters to learn from.

    row -> messages (`_chat_formats`) -> text, by the chat template -> spans of the assistant -> those to learn from

What the assistant said is found in one of two ways. A template with generation marks says so itself. Without marks,
turn i of the assistant is what rendering turns 0..i adds to rendering 0..i-1 with a generation prompt. That is right
only if both are the beginning of the whole conversation, which is checked: a template that writes earlier turns
differently once later ones exist (dropping their reasoning, say) fails the check, and the conversation is refused.
The second way counts what the template writes after a turn (an end-of-turn token and its newline) as said, like the
training templates of TRL, which put the end of a turn and its newline into their generation blocks.

A text that continues another has no template: everything after the prompt is learned.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass
from typing import Any, Literal

from penstock.sources import Records
from penstock.transforms._chat_formats import (
    ASSISTANTS,
    ChatLayout,
    Continuation,
    Dialogue,
    drop_missing,
    parse_json,
)
from penstock.transforms._chat_template import ChatTemplate, TemplateRenderer
from penstock.transforms._pictures import Picture, PictureReader, PictureSettings, expand
from penstock.transforms._special_tokens import REASON, Guard, has_mark, strip_marks
from penstock.transforms._template_sandbox import BEGIN_MARK, END_MARK, TemplateRefused
from penstock.transforms._transform import BadRows, BadValue, find_column, is_arrow

LossOn = Literal["assistant", "last"]
_ASSISTANT = "assistant"
_MARK = re.compile(f"[{BEGIN_MARK}{END_MARK}]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation; `spans` are ranges of characters to learn from, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]
    ends_with_assistant: bool
    num_spelled: int = 0
    """Special tokens that its messages spell out."""
    pictures: tuple[Picture, ...] = ()
    stranger: str = ""
    """Who speaks in place of the assistant, of whom the template says nothing: "gpt", for example."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How rows become conversations; picklable."""

    layout: ChatLayout
    template: ChatTemplate | None
    """None if texts are joined as they are."""
    guard: Guard | None
    tools_column: str | None
    loss_on: LossOn | None
    """Which turns to learn from: all of the assistant's, or the last; None if no mask is wanted."""
    pictures: PictureSettings | None = None
    """None if messages hold nothing but text."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the output; options that older versions lacked are left out if they mean what those did."""
        return {
            **(self.template.identity if self.template is not None else {}),
            "loss_mask": self.loss_on is not None,
            "tools_column": self.tools_column,
            **({"tools": "as their row has them"} if self.tools_column else {}),  # before, as the rows around it had
            **({"format": self.layout.format} if self.layout.format != "messages" else {}),
            **({"loss_on": self.loss_on} if self.loss_on not in (None, "assistant") else {}),
            **({"pictures": self.pictures.identity} if self.pictures is not None else {}),
        }


class ConversationReader:
    """Renders the conversations of rows."""

    def __init__(self, settings: ChatSettings) -> None:
        self.settings = settings
        self._renderer = None if settings.template is None else TemplateRenderer(settings.template)
        self._pictures = None if settings.pictures is None else PictureReader(settings.pictures)

    def __enter__(self) -> ConversationReader:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def read(self, records: Records, side: str, bad: BadRows) -> list[Conversation | None]:
        """One conversation of every row, rendered; None if the row is bad."""
        settings = self.settings
        columns = {name: _list_values(records, name) for name in settings.layout.columns}
        tools = _list_values(records, settings.tools_column) if settings.tools_column else itertools.repeat(None)
        beside = settings.pictures.column if settings.pictures is not None else None
        images = _list_values(records, beside) if beside else itertools.repeat(None)
        rows = zip(range(records.num_rows), zip(*columns.values(), strict=True), tools, images, strict=False)
        return [
            self._read(dict(zip(columns, row, strict=True)), given, shown, side, place, bad)
            for place, row, given, shown in rows
        ]

    def _read(
        self, row: dict[str, Any], tools: Any, images: Any, side: str, place: int, bad: BadRows
    ) -> Conversation | None:
        layout = self.settings.layout
        try:
            dialogue = layout.read(row, side, as_text=self._renderer is None)
            if isinstance(dialogue, Continuation):
                return _check_text(_continue(dialogue, self.settings.guard))
            given = parse_json(self.settings.tools_column or "", tools) if isinstance(tools, (str, bytes)) else tools
            return _check_text(self._see(dialogue, images, drop_missing(given) if given is tools else given))
        except TemplateRefused as error:
            column = side or layout.column
            bad.add(place, "chat_template", f"Column {column!r}: the chat template refuses this conversation: {error}.")
        except BadValue as error:
            bad.add(place, error.reason, str(error))
        return None

    def _see(self, dialogue: Dialogue, images: Any, tools: Any) -> Conversation:
        """The conversation with its pictures, if there may be any."""
        settings = self.settings.pictures
        if settings is None or self._pictures is None:
            return self._render(dialogue, tools)
        messages, pictures = self._pictures.take(dialogue.messages, images)
        said = self._render(dataclasses.replace(dialogue, messages=messages), tools)
        seal = self.settings.guard.seal if self.settings.guard is not None else str
        expansion = settings.expansion
        written = [seal(expansion.text(each.height, each.width)) for each in pictures]
        text, spans = expand(said.text, said.spans, seal(expansion.placeholder), written)
        return dataclasses.replace(said, text=text, spans=spans, pictures=pictures)

    def _render(self, dialogue: Dialogue, tools: Any) -> Conversation:
        assert self._renderer is not None
        messages, given, num_spelled = _keep_apart(self._renderer, dialogue.messages, tools)
        apart = dataclasses.replace(dialogue, messages=messages)
        conversation = _render_dialogue(self._renderer, apart, given, self.settings.loss_on)
        stranger = "" if self._renderer.template.has_marks(tools) else _find_stranger(dialogue.messages)
        return dataclasses.replace(conversation, num_spelled=num_spelled, stranger=stranger)


def _find_stranger(messages: list[dict[str, Any]]) -> str:
    roles = [message["role"] for message in messages]
    return "" if _ASSISTANT in roles else next((role for role in roles if role in ASSISTANTS), "")


def _check_text(conversation: Conversation) -> Conversation:
    try:
        conversation.text.encode()
    except UnicodeEncodeError:
        raise BadValue("invalid_utf8", "The conversation has a lone surrogate, which UTF-8 cannot encode.") from None
    return conversation


def _continue(given: Continuation, guard: Guard | None) -> Conversation:
    """Both texts, of which only the second is learned."""
    text = given.prompt + given.completion
    found = guard.find([text]) if guard is not None else []
    if found and guard is not None and guard.policy == "refuse":
        raise BadValue(REASON, f"The row contains the special token {found[0]!r}.")
    spans = ((len(given.prompt), len(text)),) if given.completion else ()
    return Conversation(text, spans, ends_with_assistant=True, num_spelled=len(found))


def _keep_apart(renderer: TemplateRenderer, messages: list[Any], tools: Any) -> tuple[list[Any], Any, int]:
    """The conversation with its special tokens defused, and how many it spells out; see `_special_tokens`."""
    guard, given = renderer.template.guard, [messages, tools]
    if guard is None:
        return messages, tools, 0
    if has_mark(given):
        raise BadValue("chat_template", "The conversation contains U+FDD2 or U+FDD3, which mark special tokens.")
    found = guard.find(given)
    if found and guard.policy == "refuse":
        raise BadValue(REASON, f"The conversation contains the special token {found[0]!r}.")
    defused = guard.defuse(given)
    if defused != given and strip_marks(renderer.render_plain(*defused)) != renderer.render_plain(messages, tools):
        shown = repr(found[0]) if found else "a part of one"
        raise TemplateRefused(
            f"it looks for special tokens in the messages, which contain {shown}; set special_tokens='allow' if the "
            "messages may control the model"
        )
    return defused[0], defused[1], len(found)


def _list_values(records: Records, name: str) -> list[Any]:
    column = find_column(records, name)
    values: list[Any] = column.to_pylist() if is_arrow(column) else column
    return values


def _render_dialogue(
    renderer: TemplateRenderer, dialogue: Dialogue, tools: list[Any] | None, loss_on: LossOn | None
) -> Conversation:
    """Text of a conversation and what to learn from it.

    Raises:
        TemplateRefused: it cannot be rendered, or it is unclear which part is the assistant's.
    """
    messages = dialogue.messages
    text = renderer.render(messages, tools)
    _check_words(renderer, messages, tools, text)
    ends = messages[-1].get("role") == _ASSISTANT
    if loss_on is None:
        return Conversation(text, (), ends)
    said = [turn for turn, message in enumerate(messages) if message.get("role") == _ASSISTANT]
    learned = [turn for turn in said if turn >= dialogue.num_given]
    learned = learned[-1:] if loss_on == "last" else learned
    if renderer.template.has_marks(tools):
        return Conversation(text, _find_marked(renderer, messages, tools, text, said, learned), ends)
    return Conversation(text, _find_by_prefixes(renderer, messages, tools, text, learned), ends)


def _check_words(renderer: TemplateRenderer, messages: list[Any], tools: list[Any] | None, text: str) -> None:
    """Refuse a template that writes None and lists of parts as Python does: the model would learn to say so."""
    contents = [message.get("content", "") for message in messages]
    for content in contents:
        are_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
        if content and are_parts and str(content) in text:
            raise TemplateRefused(
                f"it writes a content of parts as {content!s:.60}; give the content as text, or use a "
                "template that reads parts"
            )
    if None in contents and "None" in text:
        blank = [{**message, "content": ""} if message.get("content", "") is None else message for message in messages]
        written = renderer.render(blank, tools)
        if written != text and written.replace("None", "") == text.replace("None", ""):
            raise TemplateRefused(
                "it writes None for a message without content; give it an empty content, or use a template that reads "
                "its other fields"
            )


def _find_marked(
    renderer: TemplateRenderer,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    text: str,
    said: list[int],
    learned: list[int],
) -> tuple[tuple[int, int], ...]:
    marked = renderer.render(messages, tools, marked=True)
    if _MARK.search(text) or _MARK.sub("", marked) != text:
        raise TemplateRefused("its generation marks cannot be located: the marked text differs from the plain one")
    spans: list[tuple[int, int]] = []
    begin = None
    for count, mark in enumerate(_MARK.finditer(marked)):
        place = mark.start() - count
        expected = BEGIN_MARK if begin is None else END_MARK
        if mark.group() != expected:
            raise TemplateRefused("its generation marks are nested")
        if begin is None:
            begin = place
        else:
            spans.append((begin, place))
            begin = None
    if said and not any(begin < end for begin, end in spans):
        raise TemplateRefused("it marks nothing as generated, although the assistant has a turn")
    if learned != said:
        spans = _of_turns(spans, said, learned)
    return tuple((begin, end) for begin, end in spans if begin < end)


def _of_turns(spans: list[tuple[int, int]], said: list[int], learned: list[int]) -> list[tuple[int, int]]:
    """The spans of some of the assistant's turns."""
    if len(spans) != len(said):
        raise TemplateRefused(
            f"it marks {len(spans)} spans for {len(said)} turns of the assistant, so it is unclear which of them to "
            "learn from"
        )
    return [span for span, turn in zip(spans, said, strict=True) if turn in learned]


def _find_by_prefixes(
    renderer: TemplateRenderer,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    text: str,
    learned: list[int],
) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for turn in learned:
        # The last prefix is the whole conversation, which is already rendered.
        after = text if turn == len(messages) - 1 else renderer.render(messages[: turn + 1], tools)
        before = renderer.render(messages[:turn], tools, prompt=True)
        if not (text.startswith(after) and after.startswith(before) and len(before) < len(after)):
            raise TemplateRefused(
                f"it has no generation marks, and its rendering of turns 0 to {turn} is not the beginning of the "
                f"whole conversation, so the assistant's words cannot be located. Put {{% generation %}} and "
                f"{{% endgeneration %}} around them in the template, or set loss_mask=False"
            )
        spans.append((len(before), len(after)))
    return tuple(spans)
