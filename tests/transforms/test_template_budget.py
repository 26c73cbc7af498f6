"""Templates from strangers: what they cannot reach, and what they cannot use up."""

from __future__ import annotations

import importlib.metadata
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock import prepare
from penstock.errors import EngineFailed, MissingExtra
from penstock.transforms import Output, Tokenize, _chat_template

from .tokenizer_examples import make_records, reasons, token_lists

TALK = [{"role": "user", "content": "hi"}]
GIGABYTES = {
    "ljust": "{{ 'x'.ljust(4000000000) | length }}",
    "zfill": "{{ 'x'.zfill(4000000000) | length }}",
    "center": "{{ 'x' | center(4000000000) | length }}",
    "percent": "{{ '%*d' % (2000000000, 1) ~ '%*d' % (2000000000, 1) }}",
    "format": "{{ '{:>4000000000}'.format(1) }}",
    "indent": "{{ ('a\n' * 10000) | indent(1000000) }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "join": "{{ ['x' * 10000000] * 1000 | int | string | length }}{{ (['x' * 1000000] * 10000) | join }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 100000) }}",
    "output": "{% for i in range(1000) %}{{ 'x' * 10000000 }}{% endfor %}",
    "long": "{{ 'x'.ljust(500000000) }}",
}
FOR_EVER = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "numbers": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000) | length }}",
    "compiling": "{{ ('x' | center(40000000) | wordcount) }}" * 2000,
}


def open_template(text: str) -> Callable[[Any], Output]:
    return Tokenize("bytes", chat_template=text, loss_mask=False).open()


def render(opened: Callable[[Any], Output]) -> tuple[str, str]:
    """The conversation as text, and why the template refuses it."""
    output = opened(make_records({"messages": [TALK]}))
    text = "".join(chr(token) for tokens in token_lists(output) for token in tokens)
    return text, "".join(error.message for error in output.errors)


def renderers() -> list[psutil.Process]:
    """Processes of this one that render templates."""
    children = psutil.Process().children()
    return [child for child in children if any("_template_sandbox" in each for each in child.cmdline())]


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chat_template, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(_chat_template, "MAX_BYTES", 1 << 30)


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize("way", [*GIGABYTES, *FOR_EVER])
def test_a_template_cannot_take_gigabytes_or_for_ever(way: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    _, refusal = render(open_template({**GIGABYTES, **FOR_EVER}[way]))
    assert re.search(r"needs more memory|s of CPU time|characters; at most", refusal)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes of this process"
    assert time.process_time() - begin < 20


@pytest.mark.usefixtures("small_budget")
def test_constructing_and_sampling_are_within_the_budget_too() -> None:
    records = make_records({"messages": [TALK, TALK]})
    transform = Tokenize("bytes", chat_template=GIGABYTES["center"], loss_mask=False)
    output = transform.before_run([records]).open()(records)
    assert reasons(output) == [(0, "chat_template"), (1, "chat_template")]


@pytest.mark.usefixtures("small_budget")
def test_one_conversation_over_the_budget_does_not_stop_the_next() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'slow' %}" + loops + "{% endif %}{{ messages[0].content }}"
    talks = [[{"role": "user", "content": each}] for each in ("a", "slow", "b")]
    records = make_records({"messages": talks})
    output = Tokenize("bytes", chat_template=template, loss_mask=False).open()(records)
    assert reasons(output) == [(1, "chat_template")]
    assert "more than 0.5 s of CPU time" in output.errors[0].message
    assert [bytes(tokens) for tokens in token_lists(output)] == [b"a", b"b"]


def test_preparing_skips_a_conversation_whose_template_asks_for_gigabytes(tmp_path: Path) -> None:
    template = "{% if messages[0].content == 'b' %}" + GIGABYTES["ljust"] + "{% endif %}{{ messages[0].content }}"
    lines = [json.dumps({"messages": [{"role": "user", "content": each}]}) + "\n" for each in "abc"]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    transform = Tokenize("bytes", chat_template=template, loss_mask=False)
    done = prepare(tmp_path / "chats.jsonl", tmp_path / "data", transform=transform, workers=1, on_error="skip")
    assert done.skipped == {"chat_template": 1}
    assert [bytes(sample["tokens"].astype("uint8")) for sample in penstock.open(tmp_path / "data")] == [b"a", b"c"]


def test_tojson_takes_no_functions_from_a_template() -> None:
    for attack in ("default=lipsum", "default=cycler.__init__", "cls=cycler", "object_hook=lipsum", "skipkeys=lipsum"):
        _, refusal = render(open_template("{{ {'a': lipsum} | tojson(ATTACK) }}".replace("ATTACK", attack)))
        assert re.search("unexpected keyword argument|unsafe", refusal)
    own = "{{ {'b': 1, 'a': 'é'} | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    assert render(open_template(own)) == ('{"a":"\\u00e9","b":1}', "")


def test_a_template_finds_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    before, opened = renderers(), open_template("{{ 1 }}")
    assert render(opened) == ("1", "")
    [process] = (each for each in renderers() if each not in before)
    assert "SECRET_TOKEN" not in process.environ()


def test_an_old_jinja_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.5" if name == "jinja2" else real(name))
    with pytest.raises(MissingExtra, match=r"needs jinja2 3\.1\.6 or newer.* 3\.1\.5 is installed"):
        Tokenize("bytes", chat_template="{{ 1 }}")


def test_a_renderer_that_the_system_killed_is_an_error_not_a_bad_row() -> None:
    before, opened = renderers(), open_template("{{ messages[0].content }}")
    assert render(opened) == ("hi", "")
    [process] = (each for each in renderers() if each not in before)
    process.kill()
    with pytest.raises(EngineFailed, match="was killed by SIGKILL"):
        render(opened)
    assert render(opened) == ("hi", ""), "the next one starts anew"


def test_the_process_that_renders_ends_with_its_owner() -> None:
    code = (
        "import os, psutil; from penstock.sources import Records; from penstock.transforms import Tokenize\n"
        "opened = Tokenize('bytes', chat_template='{{ 1 }}', loss_mask=False).open()\n"
        "opened(Records({'messages': [[{'role': 'user', 'content': 'hi'}]]}, 0, 1))\n"
        "[process] = psutil.Process().children(); print(process.pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(done.stdout))
