"""Which engine runs: the fast one if it proves equal, else the reference, and a sentence that says why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from penstock.errors import MissingExtra
from penstock.schema import Ragged
from penstock.transforms._gigatoken import GigatokenEngine
from penstock.transforms._tokenizer_battery import make_battery
from penstock.transforms._tokenizer_check import TokenizerMismatch, find_difference, join_texts
from penstock.transforms._tokenizer_engines import EngineFailed, TokenizerEngine, open_reference
from penstock.transforms._tokenizer_source import TokenizerSource

EngineChoice = Literal["auto", "gigatoken", "reference"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """An engine and, where it is not the fast one although it might have been, the reason."""

    is_fast: bool
    note: str = ""

    def open(self, source: TokenizerSource) -> TokenizerEngine:
        """The engine, loaded."""
        return GigatokenEngine(source) if self.is_fast else open_reference(source)


def choose_engine(source: TokenizerSource, wanted: EngineChoice, sample: Ragged) -> ChosenEngine:
    """Compare the engines on the battery and the sample, and choose.

    Raises:
        TokenizerMismatch: they differ, and gigatoken was asked for by name.
        EngineFailed, MissingExtra: gigatoken was asked for by name and cannot be had.
    """
    if wanted == "reference" or source.kind == "bytes":
        return ChosenEngine(is_fast=False)
    try:
        _compare(source, sample)
    except (TokenizerMismatch, EngineFailed, MissingExtra) as error:
        if wanted == "gigatoken":
            raise
        note = f"The reference tokenizer is used, which is slower by 10 to 100 times: {error}"
        _log.warning(note)
        return ChosenEngine(is_fast=False, note=note)
    return ChosenEngine(is_fast=True)


def _compare(source: TokenizerSource, sample: Ragged) -> None:
    fast, reference = GigatokenEngine(source), open_reference(source)
    battery = join_texts(make_battery(source.specials))
    for name, rows in (("the battery", battery), ("the sample of your documents", sample)):
        difference = find_difference(fast, reference, rows)
        if difference is not None:
            raise TokenizerMismatch(f"gigatoken and {reference.name} differ on {name}, {difference}.")
