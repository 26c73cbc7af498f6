"""Texts that break tokenizers: one line for each thing that has gone wrong somewhere.

White space, control characters, line endings, apostrophes, digits, combining marks, scripts without spaces, emoji,
direction marks, code, escapes, the special tokens of well-known models as plain text, words without an end.
"""

from __future__ import annotations

from collections.abc import Iterable

_MAX_SPECIALS = 64
_LONG = 20_000

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
    """Texts that break tokenizers, with the tokenizer's own added tokens among them."""
    chosen = list(specials)[:_MAX_SPECIALS]
    around = ("{0}", "{0}{0}", " {0} ", "a{0}b", "a {0} b", "\n{0}\n", "{0}'s", "é{0}字", "<{0}>", "  {0}\t{0}")
    own = [pattern.format(token) for token in chosen for pattern in around]
    cut = [token[:-1] for token in chosen] + [token.swapcase() for token in chosen]
    return [*BATTERY, *own, *cut, "".join(chosen), " ".join(chosen)]
