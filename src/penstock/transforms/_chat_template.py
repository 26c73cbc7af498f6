"""Chat templates: conversations to text, by Jinja in a sandbox, as Hugging Face renders them.

A template is code that comes with a model, so it runs in Jinja's immutable sandbox: no access to Python's internals,
no change to the data, no gigabyte strings. It has the helpers that templates expect: `raise_exception`, `tojson`,
`{% generation %}`, and `strftime_now`, which returns a fixed date or refuses: a dataset must not depend on the
day it was made.

Marked rendering puts a noncharacter (U+FDD0, U+FDD1) at each end of a generation block. Removing them must give
the plain rendering, so a template that inspects its own output cannot go wrong silently.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import MissingExtra
from penstock.transforms._special_tokens import Guard
from penstock.transforms._tokenizer_source import TokenizerSource

BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MAX_REPEATED = 1 << 24
_MAX_POWER_BITS = 1 << 12


class TemplateRefused(ValueError):
    """The template, or its sandbox, will not render a conversation."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template with everything it needs except the conversation; picklable, compiled where it is used."""

    text: str
    tokens: Mapping[str, str]
    """`bos_token` and `eos_token`, as the tokenizer declares them."""
    values: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    guard: Guard | None = None
    """Keeps special tokens that the messages spell out apart from the template's own; None where that is not asked."""

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the text that the assistant generates."""
        return _GENERATION_TAG.search(self.text) is not None

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the rendering."""
        template = hashlib.sha256(self.text.encode()).hexdigest()
        return {"template": template, **self.tokens, "values": dict(self.values), "date": self.date}

    def render(
        self, messages: list[Any], tools: list[Any] | None, *, prompt: bool = False, marked: bool = False
    ) -> str:
        """The conversation as text; with `prompt`, it ends where the assistant would continue.

        Raises:
            TemplateRefused: the template raised, or did what the sandbox forbids.
        """
        template = _compile(self.text, marked, self.date)
        given = {**self.tokens, **self.values, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
        try:
            text: str = template.render(**given)
        except Exception as error:  # noqa: BLE001 (a template may raise anything)
            raise TemplateRefused(f"{type(error).__name__}: {error}") from None
        return self.guard.seal(text) if self.guard is not None else text


def load_template(
    template: str | os.PathLike[str] | Literal[True],
    source: TokenizerSource,
    values: Mapping[str, Any],
    date: str | None,
    guard: Guard | None,
) -> ChatTemplate:
    """A template from its text, a file, or the tokenizer's folder.

    Raises:
        ValueError: there is none, it is not Jinja, or the date is not an ISO date.
    """
    if date is not None:
        datetime.date.fromisoformat(date)
    json.dumps(dict(values))
    text = _find_text(template, source)
    tokens = {key: source.declared[key] for key in ("bos_token", "eos_token") if key in source.declared}
    loaded = ChatTemplate(text, tokens, dict(values), date, guard)
    _compile(text, False, date)
    return loaded


def _find_text(template: str | os.PathLike[str] | Literal[True], source: TokenizerSource) -> str:
    if template is True:
        if "chat_template" not in source.declared:
            raise ValueError(f"{source.name} has no chat template of its own; give chat_template=FILE or its text.")
        return source.declared["chat_template"]
    if isinstance(template, os.PathLike) or ("{" not in template and Path(template).is_file()):
        return Path(template).read_text("utf-8")
    if "{" not in template:
        raise FileNotFoundError(f"No chat template at {template!r}, and it is not Jinja text either.")
    return template


@functools.lru_cache(maxsize=8)
def _compile(text: str, marked: bool, date: str | None) -> Any:
    jinja2 = _import_jinja()
    try:
        return _make_environment(marked, date).from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"The chat template is not valid Jinja: line {error.lineno}: {error.message}") from None


def _import_jinja() -> Any:
    try:
        return importlib.import_module("jinja2")
    except ImportError:
        raise MissingExtra("A chat template needs jinja2: pip install 'penstock[text]'.") from None


def _make_environment(marked: bool, date: str | None) -> Any:
    # Hugging Face templates are written for these two block settings.
    sandbox, generation = _make_classes()
    environment = sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", generation])
    environment.is_marked = marked
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _make_clock(date)
    return environment


@functools.cache
def _make_classes() -> tuple[Any, Any]:
    """The sandbox and the `generation` tag; defined here because jinja2 is imported only when needed."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})
        is_marked = False

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if not _is_affordable(operator, left, right):
                raise SecurityError(f"{operator} would make a value of millions of elements")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller: Callable[[], str]) -> str:
            inner = caller()
            return f"{BEGIN_MARK}{inner}{END_MARK}" if self.environment.is_marked else inner  # type: ignore[attr-defined]

    return Sandbox, Generation


def _is_affordable(operator: str, left: Any, right: Any) -> bool:
    if operator == "**":
        exponent = abs(right) if isinstance(right, (int, float)) else 0
        return isinstance(left, float) or int(abs(left)).bit_length() * exponent <= _MAX_POWER_BITS
    sizes = [(len(a), b) for a, b in ((left, right), (right, left)) if hasattr(a, "__len__") and isinstance(b, int)]
    return all(length * times <= _MAX_REPEATED for length, times in sizes)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own `tojson` escapes HTML; templates are written for this one.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateRefused(message)


def _make_clock(date: str | None) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if date is None:
            raise TemplateRefused("it asks for today's date; give template_date='YYYY-MM-DD' so that runs agree")
        return datetime.datetime.fromisoformat(date).strftime(form)

    return strftime_now
