"""What `penstock VERB --help` says of each flag: the library's own sentence, in the shell's words."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from penstock.cli import main


def help_of(verb: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What is said about each flag."""
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    shown = capsys.readouterr().out.partition("\nexample:")[0]
    flags = re.split(r"^  (?=-)", shown, flags=re.MULTILINE)[1:]
    found = {}
    for flag in flags:
        [name] = re.findall(r"^(?:-h, )?(--?[\w-]*)", flag)
        said = re.split(r"\n {2,}| {2,}", flag.split("\n\n")[0].rstrip(), maxsplit=1)
        found[name] = " ".join(said[1].split()) if len(said) > 1 else ""
    return found


@pytest.mark.parametrize("verb", ["prepare", "doctor", "tune", "bench", "serve", "advise"])
def test_every_flag_is_described_without_words_of_python(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = help_of(verb, capsys)
    assert len(told) > 4
    assert [
        flag for flag, said in told.items() if len(said) < 12 or re.search(r"\b(None|True|<factory>)\b|`", said)
    ] == []


def test_a_flag_says_what_its_field_or_argument_says_with_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    told = help_of("prepare", capsys)
    assert told["--text-unit"] == (
        "what one document of a text file is: the file, a line, or the text between two separators (default: file)"
    )
    assert told["--separator"] == "what separates two documents, for --text-unit separator"
    assert told["--image-mode"].startswith('"resize" stretches to --image-size; ')
    assert told["--shard-bytes"].endswith("with --shuffle, twice that (default: 256MiB)")
    assert told["--workers"] == 'number of processes; "auto" is one per core that this process may use (default: auto)'
    assert help_of("doctor", capsys)["--seconds"].endswith("(default: 120)")


def test_without_sources_there_are_flags_but_no_sentences() -> None:
    code = """
import inspect
def without(owner): raise OSError("source code not available")
inspect.getsource = without
from penstock.cli import main
main(["doctor", "--help"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(r"^  --seconds SECONDS$", done.stdout, re.MULTILINE)
