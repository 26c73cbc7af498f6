"""The fast tokenizer against the reference: before a run, during it, and when they differ."""

from __future__ import annotations

import logging
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.errors import EngineFailed, TokenizerMismatch
from penstock.schema import Ragged
from penstock.transforms import _engine_choice, _tokenize_rows, _tokenizer_engines
from penstock.transforms._byte_rows import is_utf8
from penstock.transforms._engine_choice import (
    SAMPLE_BYTES,
    choose_checked,
    find_difference,
    join_texts,
    make_battery,
    take_sample,
)
from penstock.transforms._tokenize import Tokenize
from penstock.transforms._tokenizer_engines import GigatokenEngine, HuggingFaceEngine, open_reference
from penstock.transforms._tokenizer_source import load_tokenizer

from .tokenizer_examples import (
    hf_tokenizer,
    library_texts,
    normalizing_json,
    text_records,
    tiktoken_encoding,
    token_lists,
)

UNUSUAL = "aA1 \t\r\n'\"\x00\x85\u00a0\u0301\u200d\u2028\ufeff\ufdd0éß漢字한👍🏽🇩ǅİ<|>_eospadbim\x1b\x7f"


@pytest.fixture(scope="module")
def engines() -> tuple[GigatokenEngine, HuggingFaceEngine]:
    source = load_tokenizer(hf_tokenizer())
    reference = open_reference(source)
    assert isinstance(reference, HuggingFaceEngine)
    return GigatokenEngine(source), reference


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.text(UNUSUAL, max_size=40), max_size=8))
@example(["<|eos|>", "a<|eos|>b", " <|eos|> ", "penstock", "xpenstocky", "<|eos", "|eos|>"])
@example(["", " ", "  ", "\n", "\r\n", "\x00"])
@example(["a" * 5000, " " * 5000, "\u0301" * 500])
def test_gigatoken_gives_the_reference_tokens_for_any_text(
    engines: tuple[GigatokenEngine, HuggingFaceEngine], texts: list[str]
) -> None:
    difference = find_difference(*engines, join_texts(texts))
    assert difference is None, str(difference)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=12), max_size=6))
def test_a_batch_is_utf8_exactly_when_every_row_is(rows: list[bytes]) -> None:
    def decodes(row: bytes) -> bool:
        try:
            row.decode()
        except UnicodeDecodeError:
            return False
        return True

    offsets = np.cumsum([0, *map(len, rows)])
    assert is_utf8(Ragged(np.frombuffer(b"".join(rows), np.uint8), offsets)) == all(map(decodes, rows))


class Lying:
    """An engine that gets one word wrong."""

    name = "gigatoken"
    word = "surprise"

    def __init__(self, source: Any) -> None:
        self._engine = HuggingFaceEngine(source)

    def encode(self, values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Any:
        ids, ends = self._engine.encode(values, offsets)
        place = values.tobytes().find(self.word.encode())
        if place >= 0:
            document = int(np.searchsorted(offsets, place, side="right")) - 1
            ids = ids.copy()
            ids[ends[document]] += 1
        return ids, ends

    def locate(self, text: str, ids: NDArray[Any]) -> None:
        return None


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine_choice, "GigatokenEngine", Lying)


@pytest.mark.usefixtures("lying")
def test_a_difference_in_the_sample_means_the_reference_runs_and_the_run_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = text_records(["fine", "a surprise here"])
    with caplog.at_level(logging.INFO):
        ready = Tokenize(hf_tokenizer()).before_run([records])
    assert ready.engine_used == "reference"
    assert "differ on the sample of your documents, at token 0" in ready.notes[0]
    assert "a surprise here" in caplog.text
    assert token_lists(ready.open()(records))[1] == hf_tokenizer().encode("a surprise here").ids


@pytest.mark.usefixtures("lying")
def test_a_difference_in_the_battery_means_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lying, "word", "👨‍👩‍👧‍👦")
    ready = Tokenize(hf_tokenizer()).before_run([])
    assert ready.engine_used == "reference"
    assert "differ on the battery" in ready.notes[0]


@pytest.mark.usefixtures("lying")
def test_a_difference_is_an_error_when_gigatoken_was_asked_for() -> None:
    with pytest.raises(TokenizerMismatch, match="differ on the sample"):
        Tokenize(hf_tokenizer(), engine="gigatoken").before_run([text_records(["surprise"])])


@pytest.mark.usefixtures("lying")
def test_a_difference_during_the_run_stops_it_with_both_token_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine_choice, "CHECK_ONE_IN", 1)
    opened = Tokenize(hf_tokenizer()).before_run([text_records(["fine"])]).open()
    opened(text_records(["fine", "still fine"]))
    with pytest.raises(
        TokenizerMismatch, match=r"row 7,001 of the split, at token 0: .* gives \[\d+.*the reference \["
    ):
        opened(text_records(["fine", "a bad surprise"], first_row=7000))


@pytest.mark.usefixtures("lying")
def test_a_long_document_is_checked_on_its_first_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine_choice, "CHECK_ONE_IN", 1)
    monkeypatch.setattr(_engine_choice, "MAX_CHECKED_BYTES", 1000)
    opened = Tokenize(hf_tokenizer()).before_run([]).open()
    opened(text_records(["é" * 1000 + " surprise"]))
    with pytest.raises(TokenizerMismatch):
        opened(text_records(["surprise " + "é" * 1000]))


def test_without_before_run_opening_compares_the_engines_on_the_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine_choice, "GigatokenEngine", Lying)
    monkeypatch.setattr(Lying, "word", "naïve café")
    records = text_records(["naïve café"])
    assert token_lists(Tokenize(hf_tokenizer()).open()(records)) == [hf_tokenizer().encode("naïve café").ids]


def test_one_document_in_ten_thousand_is_checked_and_always_the_same_ones() -> None:
    rows, lengths = np.arange(2_000_000), np.full(2_000_000, 500)
    chosen = choose_checked(rows, lengths, key=7)
    assert 150 < len(chosen) < 250
    halves = [choose_checked(part, lengths[:1_000_000], key=7) for part in np.split(rows, 2)]
    assert chosen.tolist() == [*halves[0], *(halves[1] + 1_000_000)]
    assert choose_checked(rows, lengths, key=8).tolist() != chosen.tolist()
    assert np.diff(chosen).std() > 5_000, "the choice is spread, not periodic"


def test_the_sample_takes_at_most_one_megabyte_and_cuts_between_characters() -> None:
    rows = join_texts(["é" * 300_000, "ü" * 300_000, "never"])
    sample = take_sample(rows, SAMPLE_BYTES + 1)
    assert len(sample) == 2
    assert len(sample.values) == SAMPLE_BYTES
    assert is_utf8(sample)
    assert len(take_sample(rows, 0).values) == 0


def test_the_sample_stops_reading_when_it_has_enough() -> None:
    def endless() -> Any:
        for number in range(100):
            assert number < 4, "read on although 1 MB was there"
            yield text_records(["x y " * 100_000])

    Tokenize(hf_tokenizer()).before_run(endless())


def test_a_tokenizer_that_gigatoken_does_not_know_runs_on_the_reference() -> None:
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ready = Tokenize(tokenizer).before_run([text_records(["a b zebra"])])
    assert ready.engine_used == "reference"
    assert "gigatoken failed" in ready.notes[0]
    assert token_lists(ready.open()(text_records(["a b zebra"]))) == [[0, 1, 2]]
    with pytest.raises(EngineFailed):
        Tokenize(tokenizer, engine="gigatoken").before_run([])


def test_a_normalizing_tokenizer_still_gives_the_reference_tokens() -> None:
    tokenizer = Tokenizer.from_str(normalizing_json())
    texts = ["ÀÉ Hello", "plain"]
    opened = Tokenize(tokenizer).before_run([text_records(texts)]).open()
    assert token_lists(opened(text_records(texts))) == [
        tokenizer.encode(text, add_special_tokens=False).ids for text in texts
    ]


def test_without_gigatoken_the_reference_runs_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gigatoken", None)
    ready = Tokenize(hf_tokenizer()).before_run([])
    assert ready.engine_used == "reference"
    assert "pip install 'penstock[text]'" in ready.notes[0]


class TestMemoryOfWords:
    """gigatoken remembers every word, so it is reloaded; see NOTE [when gigatoken is reloaded]."""

    def reloads(self, monkeypatch: pytest.MonkeyPatch, at_load: int, used_bytes: list[int]) -> list[bool]:
        """Whether gigatoken is loaded again before each of some equal batches, with this much memory in use."""
        monkeypatch.setattr(_tokenizer_engines, "anonymous_bytes", lambda: at_load)
        engine = GigatokenEngine(load_tokenizer(hf_tokenizer()))
        rows = join_texts(list(library_texts()))
        expected = engine.encode(rows.values, rows.offsets)[0]
        seen = []
        for used in used_bytes:
            before = engine._tokenizer
            monkeypatch.setattr(_tokenizer_engines, "anonymous_bytes", lambda used=used: used)
            assert np.array_equal(engine.encode(rows.values, rows.offsets)[0], expected)
            seen.append(engine._tokenizer is not before)
        return seen

    def test_it_is_reloaded_once_the_process_has_grown_too_much(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit = _tokenizer_engines._MAX_GROWTH_BYTES
        assert self.reloads(monkeypatch, 0, [limit, limit, limit + 1]) == [False, False, True]

    def test_growth_counts_from_what_a_large_process_had_when_it_was_loaded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limit, large = _tokenizer_engines._MAX_GROWTH_BYTES, 4 << 30
        assert self.reloads(monkeypatch, large, [large + limit] * 3) == [False] * 3

    def test_memory_that_others_hold_does_not_reload_it_for_every_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit = _tokenizer_engines._MAX_GROWTH_BYTES
        assert self.reloads(monkeypatch, 0, [2 * limit, 2 * limit, 3 * limit]) == [True, False, False]


def test_the_battery_holds_the_tokenizers_own_tokens() -> None:
    battery = make_battery(["<|mine|>"])
    assert {"<|mine|>", "a<|mine|>b", " <|mine|> ", "<|mine|"} <= set(battery)
    assert "" in battery
    assert any("\x00" in text for text in battery)
    assert any("\r\n" in text for text in battery)
    assert any(len(text) >= 20_000 and len(set(text)) == 1 for text in battery)


def test_tiktoken_and_gigatoken_agree_on_the_battery() -> None:
    source = load_tokenizer(tiktoken_encoding())
    rows = join_texts(make_battery(source.specials))
    difference = find_difference(GigatokenEngine(source), open_reference(source), rows)
    assert difference is None, str(difference)


def test_reference_and_fast_engine_know_the_bytes_of_each_token(
    engines: tuple[GigatokenEngine, HuggingFaceEngine],
) -> None:
    text = "def naïve(x):\n    return ' 👍'  # <|eos|>"
    rows = join_texts([text])
    ids, _ = engines[0].encode(rows.values, rows.offsets)
    fast, reference = engines[0].locate(text, ids), engines[1].locate(text, ids)
    assert fast is not None
    assert fast[1][-1] == len(text.encode())
    # A character cut into several tokens belongs wholly to each of them in the reference.
    assert (reference[0] <= fast[0]).all()
    assert (reference[1] >= fast[1]).all()


def test_the_kernel_frames_every_dtype() -> None:
    for dtype in (np.uint8, np.uint16, np.uint32):
        framed = _tokenize_rows.TokenMaker._frame(
            np.array([1, 2, 3], np.uint32), np.array([0, 2, 2, 3]), 7, 9, np.dtype(dtype)
        )
        assert framed.values.dtype == dtype
        assert [document.tolist() for document in framed] == [[7, 1, 2, 9], [7, 9], [7, 3, 9]]


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_every_file_of_the_standard_library_gives_the_reference_tokens(
    engines: tuple[GigatokenEngine, HuggingFaceEngine],
) -> None:
    files = [file for file in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in file.parts]
    rows = join_texts([file.read_bytes().decode("utf-8", "ignore") for file in sorted(files)])
    difference = find_difference(*engines, rows)
    assert difference is None, str(difference)


NEW_WORDS = """
import resource, sys
import numpy as np
from penstock.transforms._tokenizer_engines import GigatokenEngine
from penstock.transforms._tokenizer_source import load_tokenizer

engine = GigatokenEngine(load_tokenizer(sys.argv[1]))
first, rng = engine._tokenizer, np.random.default_rng(7)
for _ in range(40):
    letters = rng.integers(97, 123, (400_000, 8), np.uint8)
    letters[:, 0] = ord(" ")
    engine.encode(letters.reshape(-1), np.arange(0, letters.size + 1, 32_000))
print(engine._tokenizer is not first, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_memory_stays_bounded_when_no_word_ever_comes_back(tmp_path: Path) -> None:
    hf_tokenizer().save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", NEW_WORDS, str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=280)
    was_loaded_again, peak = done.stdout.split()
    assert was_loaded_again == "True"
    assert int(peak) < 1 << 30
