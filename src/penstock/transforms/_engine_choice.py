"""Which engine tokenizes: gigatoken if it proves equal to the reference, which is checked before and during a run.

    before   on a battery of texts known to break tokenizers, and up to 1 MB of the user's own documents
    during   on one document in 10,000, by a hash of its row number and length: the same ones in every run, with any
             number of workers

After a difference before the run, the reference is used, and a note says why; a difference during it is an error.
The reference takes 0.5 s for the sample, and about 1 % of a run.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineFailed, MissingExtra, TokenizerMismatch
from penstock.schema import Ragged
from penstock.splitmix import GAMMA, mix
from penstock.transforms._special_tokens import MARK
from penstock.transforms._tokenizer_engines import GigatokenEngine, TokenizerEngine, open_reference
from penstock.transforms._tokenizer_source import TokenizerSource
from penstock.transforms._transform import row_bytes

SAMPLE_BYTES = 1 << 20
CHECK_ONE_IN = 10_000
MAX_CHECKED_BYTES = 1 << 20
_NEIGHBOURS = 4
_MAX_SPECIALS = 64
_LONG = 20_000
EngineChoice = Literal["auto", "gigatoken", "reference"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    """The engine to use and, if "auto" had to fall back to the reference, the reason."""

    is_fast: bool
    note: str = ""

    def open(self, source: TokenizerSource) -> TokenizerEngine:
        """Load the engine."""
        return GigatokenEngine(source) if self.is_fast else open_reference(source)


def choose_engine(source: TokenizerSource, wanted: EngineChoice, sample: Ragged) -> ChosenEngine:
    """Compare the engines on the battery and the sample, and choose.

    Raises:
        TokenizerMismatch: they differ, and gigatoken was requested by name.
        EngineFailed, MissingExtra: gigatoken was requested by name and cannot be used.
    """
    if wanted == "reference" or source.kind == "bytes":
        return ChosenEngine(is_fast=False)
    try:
        _compare(source, sample)
    except (TokenizerMismatch, EngineFailed, MissingExtra) as error:
        if wanted == "gigatoken":
            raise
        note = f"Using the reference tokenizer, which is 10 to 100 times slower: {error}"
        _log.info(note)  # prepare shows it as a note
        return ChosenEngine(is_fast=False, note=note)
    return ChosenEngine(is_fast=True)


def _compare(source: TokenizerSource, sample: Ragged) -> None:
    fast, reference = GigatokenEngine(source), open_reference(source)
    spelled = dict.fromkeys(token.removeprefix(MARK) for token in source.specials)
    battery = join_texts(make_battery({**spelled, **source.specials}))
    for name, rows in (("the battery", battery), ("the sample of your documents", sample)):
        difference = find_difference(fast, reference, rows)
        if difference is not None:
            raise TokenizerMismatch(f"gigatoken and {reference.name} differ on {name}, {difference}.")


def join_texts(texts: Sequence[str]) -> Ragged:
    """Texts in the form that engines take."""
    encoded = [text.encode() for text in texts]
    lengths = np.array([len(text) for text in encoded], np.int64)
    return Ragged.from_lengths(np.frombuffer(b"".join(encoded), np.uint8), lengths)


def find_difference(fast: TokenizerEngine, reference: TokenizerEngine, rows: Ragged) -> str | None:
    """How the first document on which two engines differ does so; None if there is none."""
    found_ids, found_ends = fast.encode(rows.values, rows.offsets)
    ids, ends = reference.encode(rows.values, rows.offsets)
    if np.array_equal(found_ends, ends) and np.array_equal(found_ids, ids):
        return None
    for document in range(len(rows)):
        found = found_ids[found_ends[document] : found_ends[document + 1]]
        expected = ids[ends[document] : ends[document + 1]]
        if not np.array_equal(found, expected):
            return _describe(row_bytes(rows, document), found, expected)
    return None


def _describe(text: memoryview, found: NDArray[np.integer], expected: NDArray[np.integer]) -> str:
    shared = min(len(found), len(expected))
    differs = np.flatnonzero(found[:shared] != expected[:shared])
    place = int(differs[0]) if len(differs) else shared
    begin, end = max(0, place - _NEIGHBOURS), place + _NEIGHBOURS
    return (
        f"at token {place:,}: the fast tokenizer gives {found[begin:end].tolist()} from token {begin:,}, "
        f"the reference {expected[begin:end].tolist()} ({len(found):,} and {len(expected):,} tokens "
        f"in all), for the text {str(text, 'utf-8')[:80]!r}"
    )


def cut_text(values: NDArray[np.uint8], num_bytes: int) -> NDArray[np.uint8]:
    """The first bytes of a document, cut between characters."""
    if len(values) <= num_bytes:
        return values
    while num_bytes and values[num_bytes] & 0xC0 == 0x80:
        num_bytes -= 1
    return values[:num_bytes]


def take_sample(rows: Ragged, num_bytes: int) -> Ragged:
    """Whole documents up to `num_bytes`; the last one may be cut."""
    num_bytes = min(num_bytes, len(rows.values))
    num_rows = int(np.searchsorted(rows.offsets, num_bytes, side="left"))
    values = cut_text(rows.values, num_bytes)
    return Ragged(values, np.minimum(rows.offsets[: num_rows + 1], len(values)))


def choose_checked(row_numbers: NDArray[np.int64], lengths: NDArray[np.int64], key: int) -> NDArray[np.int64]:
    """Places of the documents to check: one in 10,000, by SplitMix64 of row number, length and key."""
    with np.errstate(over="ignore"):
        mixed = row_numbers.astype(np.uint64) * GAMMA
        mixed ^= lengths.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) ^ np.uint64(key)
    return np.flatnonzero(mix(mixed) % np.uint64(CHECK_ONE_IN) == 0)


def check_document(
    fast: TokenizerEngine, reference: TokenizerEngine, text: NDArray[np.uint8], found: NDArray[np.integer]
) -> str | None:
    """Compare one document's tokens with the reference's; for a very long one, tokenize only the first 1 MB, again."""
    piece = cut_text(text, MAX_CHECKED_BYTES)
    rows = Ragged(piece, np.array([0, len(piece)]))
    if len(piece) < len(text):
        return find_difference(fast, reference, rows)
    expected, _ = reference.encode(rows.values, rows.offsets)
    return None if np.array_equal(found, expected) else _describe(row_bytes(rows, 0), found, expected)


# One line for each thing that has gone wrong somewhere: white space, control characters, line endings, apostrophes,
# digits, combining marks, scripts without spaces, emoji, direction marks, code, escapes, the special tokens of
# well-known models as plain text, endless words.
BATTERY: tuple[str, ...] = (
    "",
    " ",
    "\n",
    "\t",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces   three    four",
    " leading and trailing ",
    "\n\n\nlines\n\n",
    "a\r\nb\r\n\r\nc\rd",
    "\ttab\t\ttabs",
    " \n \n  \n",
    "x" + " " * 300 + "y",
    "\u00a0no\u00a0break\u2003em\u3000wide\u200bzero\u2028line\u2029para\u0085nel",
    "\x00",
    "a\x00b\x00\x00",
    "".join(map(chr, range(1, 32))),
    "\x7f\x80\x9f\u00ad",
    "\ufeffbom \ufeff inside",
    "\ufffd\ufffe\uffff\ufdd0",
    "don't I'll we've they're he'd I'm it's DON'T I'LL 'tis o’clock don’t",
    "'s't're've'm'll'd",
    "''''",
    "a'b'c",
    "0 1 12 123 1234 12345 123456789012345678901234567890",
    "3.14 1,000,000 1e-10 0xDEADBEEF ½ ² ٣٤٥ ४५६ Ⅷ",
    "v1.2.3-rc4",
    "naïve café résumé",
    "nai\u0308ve cafe\u0301",
    "\u0301 alone",
    "e" + "\u0301" * 50,
    "Z̷͎̋ä̶́l̸g̵o̴",
    "ÅÅ ﬁ ﬀ ſ ẞ İ ı ǅ",
    "日本語のテキスト、漢字とかな。",
    "中文没有空格的句子",
    "한국어 문장",
    "한글 자모",
    "ภาษาไทย",
    "हिन्दी में",
    "العربية ١٢٣",
    "עברית",
    "ᚠᛇᚻ",
    "👍 🎉🎉 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 👋🏽 ❤️ 1️⃣",
    "\U0001f9d1\u200d\U0001f680",
    "\u200d\u200d",
    "\ufe0f",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010ffff \U000e0041",
    "\u202eright to left\u202c",
    "\u2066isolate\u2069",
    "A\u200cB",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass\n",
    "{}[]()<>/\\|&^%$#@!~`+=-_;:\"'?.,",
    "...…!!!???",
    "----====####",
    "https://example.com/a/b?c=d&e=%20#f",
    "a@b.co <a@b.co>",
    "C:\\Users\\x\\n\\t",
    "\\u00e9 \\ud800 \\x00 &amp; &#233;",
    '"\\ud83d\\ude00"',
    "<|endoftext|>",
    "<s></s><unk><pad>",
    "[CLS] [SEP] [MASK]",
    "<|im_start|>user\nhi<|im_end|>",
    "<|",
    "|>",
    "<0x0A><0xFF>",
    "▁▁a▁b",
    "Ġthe Ċ Ā ð",
    "a" * _LONG,
    "ab" * (_LONG // 2),
    " " * _LONG,
    "\n" * _LONG,
    "1" * _LONG,
    "é" * (_LONG // 4),
    "字" * (_LONG // 4),
    "👍" * (_LONG // 8),
    "-" * _LONG,
    "A" * 999 + "a" * 999,
    "antidisestablishmentarianism" * 200,
    "a " * (_LONG // 4),
    "!?" * (_LONG // 4),
)


def make_battery(specials: Iterable[str]) -> list[str]:
    """Texts known to break tokenizers, plus some with the tokenizer's own added tokens."""
    chosen = list(specials)[:_MAX_SPECIALS]
    around = ("{0}", "{0}{0}", " {0} ", "a{0}b", "a {0} b", "\n{0}\n", "{0}'s", "é{0}字", "<{0}>", "  {0}\t{0}")
    own = [pattern.format(token) for token in chosen for pattern in around]
    cut = [token[:-1] for token in chosen] + [token.swapcase() for token in chosen]
    return [*BATTERY, *own, *cut, "".join(chosen), " ".join(chosen)]
