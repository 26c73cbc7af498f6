"""Chat templates: conversations to text, by Jinja in a sandbox, as Hugging Face renders them.

A template is code that comes with a model, so it runs in its own process, with a budget of time, memory and output
(`_template_sandbox`). It has the helpers that templates expect: `raise_exception`, `tojson`, `{% generation %}`, and
`strftime_now`, which returns a fixed date or refuses: a dataset must not depend on the day it was made.

Marked rendering puts a noncharacter (U+FDD0, U+FDD1) at each end of a generation block. Removing them must give
the plain rendering, so a template that inspects its own output cannot go wrong silently.

Price: starting Python and Jinja once per worker, and a round trip per rendering: 0.40 ms for one that takes 0.16 ms
inside the worker, on two busy cores.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import EngineFailed, MissingExtra
from penstock.filesystem import local_path, similar_path
from penstock.transforms import _template_sandbox
from penstock.transforms._special_tokens import Guard
from penstock.transforms._template_sandbox import TemplateRefused, make_environment, read_message, send_message
from penstock.transforms._tokenizer_source import TOKEN_ROLES, TokenizerSource

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OLDEST_JINJA = (3, 1, 6)
MAX_SECONDS = 10.0
"""CPU time for one rendering; an ordinary one takes a ten-thousandth of a second."""
MAX_BYTES = 2 << 30
"""Address space of the process that renders."""
MAX_OUTPUT = 16 << 20
"""Characters of a rendered conversation, beyond 16 times the size of its input."""
_PATIENCE_SECONDS = 5


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template with everything it needs except the conversation; picklable, compiled where it is used."""

    text: str
    tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and others that it mentions, as the tokenizer declares them."""
    values: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    guard: Guard | None = None
    """Keeps special tokens that the messages spell out apart from the template's own; None if not wanted."""
    tool_text: str | None = None
    """Another template, for conversations with tools; None if there is only one."""

    def text_for(self, tools: list[Any] | None) -> str:
        """The template for a conversation with these tools."""
        return self.text if tools is None or self.tool_text is None else self.tool_text

    def has_marks(self, tools: list[Any] | None) -> bool:
        """Whether the template for these tools marks the text that the assistant generates."""
        return _GENERATION_TAG.search(self.text_for(tools)) is not None

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rendering."""
        template = hashlib.sha256(self.text.encode()).hexdigest()
        other = {"tool_template": hashlib.sha256(self.tool_text.encode()).hexdigest()} if self.tool_text else {}
        return {"template": template, **other, **self.tokens, "values": dict(self.values), "date": self.date}


class TemplateRenderer:
    """Renders a template in a separate process, which is restarted if a rendering ended it."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., TemplateRenderer] | None = None

    def __enter__(self) -> TemplateRenderer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; it is restarted when needed."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def render(
        self, messages: list[Any], tools: list[Any] | None, *, prompt: bool = False, marked: bool = False
    ) -> str:
        """The conversation as text, sealed; with `prompt`, it ends where the assistant would continue.

        Raises:
            TemplateRefused: the template raised, did what the sandbox forbids, or went over its budget.
            EngineFailed: the process that renders cannot be started, or was killed.
        """
        text = self.render_plain(messages, tools, prompt=prompt, marked=marked)
        return self.template.guard.seal(text) if self.template.guard is not None else text

    def render_plain(
        self, messages: list[Any], tools: list[Any] | None, *, prompt: bool = False, marked: bool = False
    ) -> str:
        """The conversation exactly as the template writes it; raises what `render` does."""
        given = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        values = {"documents": None, **self.template.tokens, **self.template.values, **given}
        asked = {"text": self.template.text_for(tools), "marked": marked, "values": values}
        is_good, data = self._ask(pickle.dumps(asked))
        if not is_good:
            raise TemplateRefused(data.decode("utf-8", "replace").removeprefix("TemplateRefused: "))
        return data.decode("utf-8", "surrogatepass")

    def _ask(self, request: bytes) -> tuple[bool, bytes]:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            send_message(process.stdin, True, request)
        answer = read_message(process.stdout)
        if answer is not None:
            return answer
        code = process.wait(_PATIENCE_SECONDS)
        self.close()
        if code == -signal.SIGPROF:
            raise TemplateRefused(f"it takes more than {MAX_SECONDS:g} s of CPU time for one conversation")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise EngineFailed(f"The process that renders the chat template {how}. Out of memory? Use fewer workers.")

    def _start(self) -> subprocess.Popen[bytes]:
        # No environment variables: a template that escapes its sandbox must find no secrets. Python needs this one.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        process = subprocess.Popen(  # noqa: S603 (our own file)
            [sys.executable, "-I", "-S", "-X", "utf8", _template_sandbox.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        limits = {"max_seconds": MAX_SECONDS, "max_bytes": MAX_BYTES, "max_output": MAX_OUTPUT}
        settings = {"date": self.template.date, "path": sys.path, **limits}
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            send_message(process.stdin, True, pickle.dumps(settings))
        self._process, self._end = process, weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, even in the middle of a rendering."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


def load_template(
    template: str | os.PathLike[str] | Literal[True],
    source: TokenizerSource,
    values: Mapping[str, Any],
    date: str | None,
    guard: Guard | None,
    *,
    with_tools: bool,
) -> ChatTemplate:
    """A template from its text, a file, or the tokenizer's folder, which may have another one for tools.

    Raises:
        ValueError: there is none, it is not Jinja, or the date is not an ISO date.
    """
    if date is not None:
        _check_date(date)
    json.dumps(dict(values))
    text = _find_text(template, source)
    tool_text = source.declared.get("tool_template") if template is True and with_tools else None
    for each in filter(None, (text, tool_text)):
        _check_syntax(each)
    tokens = _find_tokens(text + (tool_text or ""), source.declared)
    return ChatTemplate(text, tokens, dict(values), date, guard, tool_text)


def _find_tokens(text: str, declared: Mapping[str, str]) -> dict[str, str]:
    """Tokens that a template may write. All but BOS and EOS only if it does: they are part of a dataset's identity."""
    roles = [role for role in TOKEN_ROLES if role in ("bos_token", "eos_token") or role in text]
    return {role: declared[role] for role in roles if role in declared}


def _check_date(date: str) -> None:
    try:
        datetime.date.fromisoformat(date)
    except (TypeError, ValueError):
        raise ValueError(f"template_date={date!r}: a date such as '2026-07-01' is needed.") from None


def _find_text(template: str | os.PathLike[str] | Literal[True], source: TokenizerSource) -> str:
    if template is True:
        if "chat_template" not in source.declared:
            raise ValueError(f"{source.name} has no chat template; give chat_template=FILE or its text.")
        return source.declared["chat_template"]
    if isinstance(template, os.PathLike) or "{" not in template:
        path = local_path(template, "a chat template")
        if path.is_file():
            return path.read_text("utf-8")
        raise FileNotFoundError(
            f"No chat template at {template!r}, and it is not Jinja text either.{similar_path(path)}"
        )
    return template


def _check_syntax(text: str) -> None:
    """Only parse: compiling would evaluate constant expressions, which must not happen in this process."""
    jinja2 = _import_jinja()
    try:
        make_environment(False, None).parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"The chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise ValueError("The chat template is not valid Jinja: its expressions are nested too deeply.") from None


def _import_jinja() -> Any:
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError:
        raise MissingExtra("A chat template needs jinja2: pip install 'penstock-data[text]'.") from None
    version = importlib.metadata.version("jinja2")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _OLDEST_JINJA:
        raise MissingExtra(
            f"A chat template needs jinja2 3.1.6 or newer, whose sandbox is secure; {version} is installed: "
            "pip install 'penstock-data[text]'."
        )
    return jinja2
