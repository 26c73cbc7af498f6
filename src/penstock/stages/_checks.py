"""How the settings of stages are checked when they are made."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, get_args

from penstock.errors import whole_number


class Checked(Protocol):
    """A stage, as far as errors name it."""

    verb: ClassVar[str]


def make_whole(stage: Checked, name: str, *, at_least: int | None = None, at_most: int | None = None) -> None:
    """Make a field a Python int; `TypeError` or `ValueError` if it is no number in range."""
    number = whole_number(stage.verb, name, getattr(stage, name), at_least=at_least, at_most=at_most)
    object.__setattr__(stage, name, number)


def check_choice(stage: Checked, name: str, choices: Any) -> None:
    """Refuse a value that is not among those of a `Literal`."""
    if getattr(stage, name) not in (allowed := get_args(choices)):
        told = " and ".join(map(repr, allowed))
        raise ValueError(f"{stage.verb}({name}={getattr(stage, name)!r}): the choices are {told}.")


def check_names(stage: Checked, name: str) -> None:
    """Refuse what cannot be names of columns."""
    if not all(isinstance(each, str) for each in getattr(stage, name)):
        raise TypeError(f"{stage.verb}({name}={getattr(stage, name)!r}): the names of columns are needed.")
