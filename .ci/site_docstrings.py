"""Docstrings as the site shows them: doctests are code, and parameters that share a line are listed one by one.

An extension of griffe, which reads docstrings for mkdocstrings (`extensions:` in mkdocs.yml).
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
_IMPORTS = re.compile(r"^May import: .*(?:\n(?!\s*$).*)*", re.MULTILINE)
_SHARED = re.compile(r"^ {4}(\w+(?:,\s+\w+)+): ((?:.|\n {8})*)", re.MULTILINE)


class ForSite(griffe.Extension):
    """Rewrites each docstring once it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """A docstring with fences around doctests and a line for each parameter, without what doors say of imports."""
    text = _IMPORTS.sub("", text)
    text = _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
    return _SHARED.sub(lambda found: "\n".join(f"    {name}: {found[2]}" for name in re.split(r",\s+", found[1])), text)
