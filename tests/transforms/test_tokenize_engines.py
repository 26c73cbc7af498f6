"""The fast tokenizer against the reference: before a run, during it, and when they differ."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.errors import EngineFailed, TokenizerMismatch
from penstock.transforms import Output, Tokenize, _engine_choice

from .tokenizer_examples import (
    BOS,
    EOS,
    hf_tokenizer,
    library_texts,
    make_records,
    normalizing_json,
    reasons,
    text_records,
    tiktoken_encoding,
    token_lists,
    tokenizer_json,
)

UNUSUAL = "aA1 \t\r\n'\"\x00\x85\u00a0\u0301\u200d\u2028\ufeff\ufdd0éß漢字한👍🏽🇩ǅİ<|>_eospadbim\x1b\x7f"


MEGABYTE = 1 << 20

Fast = Callable[[Any], Output]


@pytest.fixture(scope="module")
def fast() -> Fast:
    return Tokenize(hf_tokenizer(), engine="gigatoken", special_tokens="allow").before_run([]).open()


def check(fast: Fast, texts: list[str]) -> None:
    """Compare the fast tokenizer's ids with those of `tokenizers` itself."""
    expected = hf_tokenizer().encode_batch(texts, add_special_tokens=False)
    assert token_lists(fast(text_records(texts))) == [each.ids for each in expected]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.text(UNUSUAL, max_size=40), max_size=8))
@example(["<|eos|>", "a<|eos|>b", " <|eos|> ", "penstock", "xpenstocky", "<|eos", "|eos|>"])
@example(["", " ", "  ", "\n", "\r\n", "\x00"])
@example(["a" * 5000, " " * 5000, "\u0301" * 500])
def test_gigatoken_gives_the_reference_tokens_for_any_text(fast: Fast, texts: list[str]) -> None:
    check(fast, texts)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=12), min_size=1, max_size=6))
def test_a_row_is_bad_exactly_when_it_is_not_utf8_by_itself(rows: list[bytes]) -> None:
    def decodes(row: bytes) -> bool:
        try:
            row.decode()
        except UnicodeDecodeError:
            return False
        return True

    output = Tokenize("bytes").open()(make_records({"text": pa.array(rows, pa.large_binary())}))
    assert reasons(output) == [(place, "invalid_utf8") for place, row in enumerate(rows) if not decodes(row)]
    assert [bytes(tokens) for tokens in token_lists(output)] == list(filter(decodes, rows))


class Lying:
    """gigatoken's tokenizer, but it gets one word wrong."""

    word = "surprise"

    def __init__(self, data: bytes) -> None:
        self._tokenizer = Tokenizer.from_str(data.decode())

    def encode_batch(self, documents: Any, parallel: bool) -> Any:
        texts = [document.decode() for document in documents.tolist()]
        ids = [each.ids for each in self._tokenizer.encode_batch(texts, add_special_tokens=False)]
        for text, own in zip(texts, ids, strict=True):
            if self.word in text:
                own[0] += 1
        values = SimpleNamespace(data=np.array([each for own in ids for each in own], np.uint32))
        offsets = SimpleNamespace(data=np.cumsum([0, *map(len, ids)]))
        return SimpleNamespace(layout=SimpleNamespace(content=values, offsets=offsets))


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_json=Lying))
    monkeypatch.setitem(sys.modules, "gigatoken", library)


class Remembering:
    """A tokenizer of the reference library that adds the texts it encodes to a list."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self._texts += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the reference library was asked to encode."""
    texts: list[str] = []
    library = SimpleNamespace(from_str=lambda text: Remembering(Tokenizer.from_str(text), texts))
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=library))
    return texts


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


@pytest.mark.usefixtures("lying")
def test_without_before_run_opening_compares_the_engines_on_the_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lying, "word", "naïve café")
    records = text_records(["naïve café"])
    assert token_lists(Tokenize(hf_tokenizer()).open()(records)) == [hf_tokenizer().encode("naïve café").ids]


def test_one_document_in_ten_thousand_is_checked_and_always_the_same_ones(asked: list[str]) -> None:
    def checked(opened: Fast, begin: int, end: int) -> list[int]:
        asked.clear()
        opened(text_records([f"{number:07}" for number in range(begin, end)], first_row=begin))
        return [int(text) for text in asked]

    opened = Tokenize(hf_tokenizer()).before_run([]).open()
    chosen = checked(opened, 0, 400_000)
    assert 20 < len(chosen) < 65
    assert chosen == [*checked(opened, 0, 200_000), *checked(opened, 200_000, 400_000)]
    other = Tokenize(Tokenizer.from_str(tokenizer_json(900))).before_run([]).open()
    assert checked(other, 0, 400_000) != chosen
    assert np.diff(chosen).std() > 5_000, "the choice is spread, not periodic"


def test_the_sample_takes_at_most_one_megabyte_and_cuts_between_characters(asked: list[str]) -> None:
    Tokenize(hf_tokenizer()).before_run([])
    battery = len(asked)
    asked.clear()
    Tokenize(hf_tokenizer()).before_run([text_records(["a" + "é" * 300_000, "ü" * 300_000, "never"])])
    sample = asked[battery:]
    assert [text[:2] for text in sample] == ["aé", "üü"]
    assert sum(len(text.encode()) for text in sample) == MEGABYTE - 1, "half a character would not fit"


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
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    ready = Tokenize(hf_tokenizer()).before_run([])
    assert ready.engine_used == "reference"
    assert "pip install 'penstock-data[text]'" in ready.notes[0]


class TestMemoryOfWords:
    """gigatoken remembers every word, so it is reloaded; see NOTE [when gigatoken is reloaded]."""

    LIMIT = 256 * MEGABYTE

    def reloads(self, monkeypatch: pytest.MonkeyPatch, at_load: int, used_bytes: list[int]) -> list[bool]:
        """Whether gigatoken is loaded again before each of some equal batches, with this much memory in use."""
        import gigatoken

        used, loads, read_bytes = [at_load], [], Path.read_bytes

        def read_memory(path: Path) -> bytes:
            pages = -(-used[0] // resource.getpagesize())
            return f"0 {pages} 0".encode() if path == Path("/proc/self/statm") else read_bytes(path)

        def load(data: bytes) -> Any:
            loads.append(data)
            return gigatoken.Tokenizer.from_json(data)

        library = SimpleNamespace(Tokenizer=SimpleNamespace(from_json=load))
        monkeypatch.setitem(sys.modules, "gigatoken", library)
        monkeypatch.setattr(Path, "read_bytes", read_memory)
        records = text_records(library_texts())
        opened = Tokenize(hf_tokenizer(), engine="gigatoken").before_run([]).open()
        expected, seen = token_lists(opened(records)), []
        for used[0] in used_bytes:
            num_loads = len(loads)
            assert token_lists(opened(records)) == expected
            seen.append(len(loads) > num_loads)
        return seen

    def test_it_is_reloaded_once_the_process_has_grown_too_much(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit = self.LIMIT
        assert self.reloads(monkeypatch, 0, [limit, limit, limit + 1]) == [False, False, True]

    def test_growth_counts_from_what_a_large_process_had_when_it_was_loaded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limit, large = self.LIMIT, 4 << 30
        assert self.reloads(monkeypatch, large, [large + limit] * 3) == [False] * 3

    def test_memory_that_others_hold_does_not_reload_it_for_every_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit = self.LIMIT
        assert self.reloads(monkeypatch, 0, [2 * limit, 2 * limit, 3 * limit]) == [True, False, False]


def test_the_battery_holds_the_tokenizers_own_tokens(asked: list[str]) -> None:
    Tokenize(hf_tokenizer(), special_tokens="allow").before_run([])
    assert {EOS, f"a{EOS}b", f" {EOS} ", EOS[:-1]} <= set(asked)
    assert "" in asked
    assert any("\x00" in text for text in asked)
    assert any("\r\n" in text for text in asked)
    assert any(len(text) >= 20_000 and len(set(text)) == 1 for text in asked)


def test_tiktoken_and_gigatoken_agree_on_the_battery() -> None:
    ready = Tokenize(tiktoken_encoding(), engine="gigatoken", special_tokens="allow").before_run([])
    assert ready.engine_used == "gigatoken"


def test_both_engines_know_which_tokens_a_text_begins_and_ends_in() -> None:
    text = "def naïve(x):\n    return ' 👍'  # <|eos|>"
    places = range(len(text) + 1)
    records = make_records(
        {"prompt": [text[:place] for place in places], "completion": [text[place:] for place in places]}
    )
    fast, slow = (
        Tokenize(hf_tokenizer(), chat_format="prompt", engine=engine, special_tokens="allow").open()(records)
        for engine in ("gigatoken", "reference")
    )
    assert token_lists(fast) == token_lists(slow)
    learned, expected = fast.columns["loss_mask"], slow.columns["loss_mask"]
    assert learned[0].all()
    assert not learned[len(text)].any()
    assert [bool(learned[place][-1]) for place in places[:-1]] == [True] * len(text)
    # A character cut into several tokens belongs wholly to each of them in the reference.
    assert (learned.values <= expected.values).all()
    differing = [place for place in places if not np.array_equal(learned[place], expected[place])]
    assert not any(text[place:].isascii() for place in differing)


def test_tokens_of_every_dtype_are_framed() -> None:
    content = json.loads(tokenizer_json())
    content["model"]["vocab"]["zz"] = 70_000
    for tokenizer, first, last, dtype in (
        ("bytes", "<|bos|>", "<|eos|>", np.uint16),
        (Tokenizer.from_str(json.dumps(content)), BOS, EOS, np.uint32),
    ):
        records = text_records(["ab", "", "c"])
        plain = Tokenize(tokenizer).open()(records)
        transform = Tokenize(tokenizer, prepend_bos=first, append_eos=last)
        framed = transform.open()(records)
        assert framed.columns["tokens"].values.dtype == dtype
        around = [[transform.bos_id, *tokens, transform.eos_id] for tokens in token_lists(plain)]
        assert token_lists(framed) == around


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_every_file_of_the_standard_library_gives_the_reference_tokens(fast: Fast) -> None:
    files = [file for file in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in file.parts]
    check(fast, [file.read_bytes().decode("utf-8", "ignore") for file in sorted(files)])


NEW_WORDS = """
import resource, sys
from types import SimpleNamespace
import gigatoken
import numpy as np
import pyarrow as pa
from penstock.sources import Records
from penstock.transforms import Tokenize

loads = []
load = lambda data: loads.append(None) or gigatoken.Tokenizer.from_json(data)
sys.modules["gigatoken"] = SimpleNamespace(Tokenizer=SimpleNamespace(from_json=load))
opened = Tokenize(sys.argv[1], engine="gigatoken").before_run([]).open()
before, rng = len(loads), np.random.default_rng(7)
for _ in range(40):
    letters = rng.integers(97, 123, (400_000, 8), np.uint8)
    letters[:, 0] = ord(" ")
    offsets = np.arange(0, letters.size + 1, 32_000)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
    texts = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)
    opened(Records({"text": texts}, 0, len(texts)))
print(len(loads) > before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
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
