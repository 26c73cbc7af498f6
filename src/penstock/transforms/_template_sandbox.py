"""The program that renders chat templates: Jinja in a sandbox, in a separate process that can be killed.

A template is code that comes with a model. Jinja's immutable sandbox keeps it away from Python's internals and from the
data, but not from CPU and memory: a single line of padding, formatting, doubling or nested loops can take gigabytes, or
for ever. So `_chat_template` runs this file as a program, and the system holds it to a budget:

    time      a CPU timer ends the process (SIGPROF), even inside C code
    memory    a limit on address space makes an allocation fail
    output    a text longer than the limit is not sent

The program has no environment variables, writes no files, and imports nothing but Jinja. It gets pickles from the
process that started it, and answers with plain bytes. When that process is gone, its input ends, and it exits.

    {date, limits, path} -> then for each rendering: {text, marked, values} -> (is_good, text or reason)
"""

import datetime
import functools
import json
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"
_MAX_REPEATED = 1 << 24
_MAX_POWER_BITS = 1 << 12
HEADER = struct.Struct("<?Q")


class TemplateRefused(ValueError):
    """The template, or its sandbox, will not render a conversation."""


def make_environment(marked: bool, date: str | None) -> Any:
    """The environment that Hugging Face templates expect, without access to anything else."""
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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like transformers' filter; Jinja's own escapes HTML. No option is a function: `default=` would let a template
    have something called."""
    pair = None if separators is None else (str(separators[0]), str(separators[1]))
    return json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=pair, sort_keys=bool(sort_keys))


def _raise(message: str) -> None:
    raise TemplateRefused(message)


def _make_clock(date: str | None) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if date is None:
            raise TemplateRefused("it uses today's date; give template_date='YYYY-MM-DD' so that runs agree")
        return datetime.datetime.fromisoformat(date).strftime(form)

    return strftime_now


def read_message(file: IO[bytes]) -> tuple[bool, bytes] | None:
    """A message from the other side; None if the other side is gone."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    is_good, size = HEADER.unpack(header)
    data = file.read(size)
    return (is_good, data) if len(data) == size else None


def send_message(file: IO[bytes], is_good: bool, data: bytes) -> None:
    """Send a message to the other side."""
    file.write(HEADER.pack(is_good, len(data)) + data)
    file.flush()


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Render until there are no more requests."""
    first = read_message(requests)
    assert first is not None, "the first message says what to render"
    settings = pickle.loads(first[1])  # noqa: S301 (from the process that started this one)
    sys.path[:] = settings["path"]
    _limit(settings["max_bytes"])

    @functools.cache
    def compile_template(text: str, marked: bool) -> Any:
        return make_environment(marked, settings["date"]).from_string(text)

    while request := read_message(requests):
        asked = pickle.loads(request[1])  # noqa: S301 (as above)
        signal.setitimer(signal.ITIMER_PROF, settings["max_seconds"])
        is_good, text = _render(compile_template, asked, settings["max_output"] + 16 * len(request[1]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_message(answers, is_good, text)


def _render(compile_template: Callable[[str, bool], Any], asked: dict[str, Any], max_output: int) -> tuple[bool, bytes]:
    try:
        text = compile_template(asked["text"], asked["marked"]).render(**asked["values"])
        if len(text) > max_output:
            return False, f"it writes {len(text):,} characters; at most {max_output:,} are allowed here".encode()
        return True, text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return False, b"it needs more memory than a template may use"
    except Exception as error:  # noqa: BLE001 (a template may raise anything)
        return False, f"{type(error).__name__}: {error!s:.2000}".encode("utf-8", "replace")


def _limit(max_bytes: int) -> None:
    import resource

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    for what, limit in ((resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(what)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (soft, soft))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
