"""Flags made of what they set: an argument of a function, or a field of a settings class.

A setting is described once, where Python users read it: its type is the annotation, its default stands in the
signature, and its meaning in the sentence under the field or in the docstring's `Args`. A flag adds only how its value
is typed. One that is not given is missing from the parsed arguments, so that the library's own default holds.

Sentences under fields are not there at run time, so a class's source is read: 8 ms for the largest. Without sources its
flags have no sentence.
"""

import argparse
import ast
import functools
import inspect
import itertools
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from penstock.cli import _values


class Flags:
    """Adds flags to a parser or one of its groups, for arguments of `owner`, a function or a class."""

    def __init__(self, parser: Any, owner: Callable[..., Any], *, prefix: str = "") -> None:
        self._parser, self._owner, self._prefix = parser, owner, prefix

    def add(self, *names: str, flag: str | None = None, **options: Any) -> None:
        """Add a flag for each name; `options` go to `add_argument`, and replace what the setting itself says."""
        settings, sentences = inspect.signature(self._owner).parameters, _sentences_of(self._owner)
        scope = vars(sys.modules[self._owner.__module__])
        for name in names:
            dest = self._prefix + name
            annotation = settings[name].annotation
            if isinstance(annotation, str):
                annotation = eval(annotation, scope)  # noqa: S307 - our own, from a module that evaluates them late
            told = {"dest": dest, "default": argparse.SUPPRESS} | _parsing_of(name, annotation)
            if name in sentences:
                told["help"] = self._help_of(sentences[name], settings[name].default, settings, told)
            self._parser.add_argument(flag or flag_of(dest), **told | options)

    def _help_of(self, sentence: str, default: Any, settings: Mapping[str, Any], told: Mapping[str, Any]) -> str:
        """The sentence as users of a shell need it: other settings are flags; what None and True mean is left out."""

        def in_shell(match: re.Match[str]) -> str:
            name, value = match[1], (match[2] or "").removeprefix("True")
            is_flag = name in settings and settings[name].default is not inspect.Parameter.empty
            return f"{flag_of(self._prefix + name) if is_flag else name} {value}".strip()

        text = re.sub(r'`(\w+)(?:="?([\w-]*)"?)?`', in_shell, sentence)
        text = re.sub(r"[;,] (None|True) .*?(?=[;,] None |; |\. |\.?$)", "", text).removesuffix(".")
        text = text[0].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text
        if isinstance(default, str | int | float) and default and "action" not in told and "default" not in text:
            is_size = told.get("type") is _values.size
            shown = f"{int(default) >> 20}MiB" if is_size else f"{default:g}" if isinstance(default, float) else default
            text += f" (default: {shown})"
        return text.replace("%", "%%")


def given(arguments: argparse.Namespace, owner: Callable[..., Any], *, without: str = "") -> dict[str, Any]:
    """The arguments of `owner` that were given as flags; `without` those whose flags belong to something else."""
    names = inspect.signature(owner).parameters.keys() - set(without.split())
    return {name: value for name, value in vars(arguments).items() if name in names}


def flag_of(name: str) -> str:
    """How a setting is typed."""
    return f"--{name.replace('_', '-')}"


def add_security(parser: argparse.ArgumentParser) -> None:
    """The flags of verbs that connect machines: how each side proves itself to the other."""
    from penstock.service import Security

    Flags(parser, Security).add("token_file", "certificate", "key", "authority")


def add_allow_code(parser: Any) -> None:
    """The flag of verbs that load a plan file, for a parser or one of its groups."""
    parser.add_argument(
        "--allow-code", action="append", default=[], metavar="PACKAGE", help="package whose functions the plan may name"
    )


def _parsing_of(name: str, annotation: Any) -> dict[str, Any]:
    """How argparse gets a value of this type."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    origins = [get_origin(kind) or kind for kind in kinds]
    if bool in kinds and str not in kinds:
        return {"action": argparse.BooleanOptionalAction if types.NoneType in kinds else "store_true"}
    if Literal in origins and not {*origins} - {Literal, types.NoneType}:
        return {"choices": [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]}
    if name.endswith("_bytes"):
        return {"type": _values.size, "metavar": "SIZE"}
    if float in kinds:
        return {"type": float, "metavar": name.rpartition("_")[2].upper()}
    if int in kinds:
        return {"type": int, "metavar": "N"}
    if os.PathLike in origins:
        return {"type": _values.path, "metavar": "FILE"}
    return {"type": _values.names, "metavar": "NAME,…"} if tuple in origins else {"metavar": "NAME"}


@functools.cache
def _sentences_of(owner: Callable[..., Any]) -> Mapping[str, str]:
    """What is said about each argument."""
    listed = _in_docstring(inspect.getdoc(owner) or "")
    return {**listed, **_under_fields(owner)} if isinstance(owner, type) else listed


def _under_fields(owner: type) -> Mapping[str, str]:
    try:
        [described] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except OSError:
        return {}
    assert isinstance(described, ast.ClassDef)
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in itertools.pairwise(described.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _in_docstring(docstring: str) -> Mapping[str, str]:
    _, _, rest = docstring.partition("\nArgs:\n")
    listed = re.split(r"\n\n", rest, maxsplit=1)[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
