"""`Tokenize`: text or conversations to tokens, the transform most datasets are made with.

Tokens are those of the reference library (`tokenizers` or tiktoken), whichever engine computes them;
`_engine_choice` says how that is checked. Special tokens that a text spells out are text (`_special_tokens`).
Nothing is added around a document except what `prepend_bos` and `append_eos` say: a tokenizer's own post-processor
is not used.

An empty document is kept: it becomes BOS and EOS if they are wanted, otherwise a document without tokens, which is in
no packed row. A null, a value that is not text, and text that is not UTF-8 are bad rows.

Price: 4 MB of Python source take gigatoken 12 ms or more, the rest of the transform 1 (benchmarks/bench_tokenize.py).
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from penstock.errors import SchemaError, check_choice, did_you_mean, nearest_name
from penstock.schema import Ragged
from penstock.sources import Records
from penstock.transforms._chat_formats import ChatFormat, ChatLayout, guess_format
from penstock.transforms._chat_template import load_template
from penstock.transforms._conversations import ChatSettings, Conversation, ConversationReader, LossOn
from penstock.transforms._engine_choice import (
    SAMPLE_BYTES,
    ChosenEngine,
    EngineChoice,
    choose_engine,
    join_texts,
    take_sample,
)
from penstock.transforms._images import DEFAULT_MAX_PIXELS
from penstock.transforms._keep import Keep, check_keep, infer_types
from penstock.transforms._pictures import PictureSettings
from penstock.transforms._processors import load_expansion
from penstock.transforms._special_tokens import Guard, SpecialTokens, seal_tokenizer
from penstock.transforms._tokenize_rows import OpenChat, OpenTokenize, TokenMaker, made_columns, smallest_dtype
from penstock.transforms._tokenizer_source import TokenizerSource, load_tokenizer, tokens_around
from penstock.transforms._transform import BadRows, OpenTransform, find_absent, list_fields, read_text

VERSION = 1
_MOST_WITHOUT = 16
"""Batches that are searched for a row with the column, 64 MB of raw data."""
_USUAL_NAMES = ("text", "content", "body", "document", "code", "markdown", "article", "raw_content")


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Turn a column of text, or of conversations, into the column `tokens`.

    Raises:
        ValueError: the tokenizer has no such EOS or BOS token, or the chat template cannot be used.
        FileNotFoundError: no tokenizer at that path.
        MissingExtra: the library for this tokenizer is not installed.

    >>> Tokenize("bytes", append_eos="<|eos|>").columns()
    {'tokens': 'uint16[*]'}
    """

    tokenizer: Any
    """A tokenizer.json, a Hugging Face folder, an object of `tokenizers` or tiktoken, "tiktoken:NAME", or "bytes"."""
    column: str = ""
    """Column to read; by default "text", or with a chat template "messages", or what `chat_format` says. "a.b" is the
    field `b` of the column `a`."""
    append_eos: str | bool | None = field(default=None, kw_only=True)
    """Token to end each document with; True uses the one that the tokenizer's folder declares, None adds nothing."""
    prepend_bos: str | bool | None = field(default=None, kw_only=True)
    """Token to begin each document with, likewise."""
    keep: Keep = field(default=(), kw_only=True)
    """Other columns to store: names, or `{name: type}`."""
    engine: EngineChoice = field(default="auto", kw_only=True)
    """"auto" uses gigatoken if it proves equal to the reference; "gigatoken" fails if it does not; "reference" is 10 to
    100 times slower."""
    special_tokens: SpecialTokens = field(default="text", kw_only=True)
    """What to do with special tokens spelled out in a text or message: encode them as "text", do so and "count" them,
    "refuse" the row, or "allow" them to control the model."""
    chat_template: str | os.PathLike[str] | bool | None = field(default=None, kw_only=True)
    """A Jinja template, a file with one, or True for the tokenizer's own; rows are then lists of messages."""
    chat_format: ChatFormat | None = field(default=None, kw_only=True)
    """How rows hold conversations: "messages", "sharegpt" (both with the tokenizer's own template if none is given),
    "prompt" (columns `prompt` and `completion`), "preference" (`chosen` and `rejected`, and a prompt if `column` names
    one); the last two are joined as plain text unless there is a template."""
    loss_mask: bool = field(default=True, kw_only=True)
    """For conversations: also store which tokens the assistant said; refuse one for which that is unclear."""
    loss_on: LossOn = field(default="assistant", kw_only=True)
    """Which turns the mask covers: all of the "assistant", or its "last"; never those of a prompt."""
    template_values: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """More variables for the template, such as `{"enable_thinking": False}`; JSON."""
    template_date: str | None = field(default=None, kw_only=True)
    """Date that `strftime_now` returns, such as "2026-07-01"; today's would change the data from day to day."""
    tools_column: str | None = field(default=None, kw_only=True)
    """With a chat template: the column with the tools of each conversation."""
    processor: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    """For conversations with pictures: the folder of the processor, which says how many tokens they become. They are
    stored in the columns `images` and `image_sizes`."""
    media_root: str | None = field(default=None, kw_only=True)
    """Folder or URL that paths of pictures count from; nothing outside is read. By default, only bytes are taken."""
    images_column: str | None = field(default=None, kw_only=True)
    """A column with the pictures of parts that name none."""
    max_pixels: int = field(default=DEFAULT_MAX_PIXELS, kw_only=True)
    """Conversations with a larger picture are bad rows."""
    _chat: ChatSettings | None = field(default=None, init=False, repr=False, compare=False)
    _chosen: ChosenEngine | None = field(default=None, init=False, repr=False, compare=False)
    _types: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)
    _strangers: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineChoice):
            raise ValueError(f"engine={self.engine!r}; the engines are 'auto', 'gigatoken' and 'reference'.")
        check_choice("special_tokens", self.special_tokens, get_args(SpecialTokens))
        self._set("tokenizer", load_tokenizer(self.tokenizer))
        self._set("_chat", self._load_chat())
        self._set("column", self._chat.layout.column if self._chat else self.column or "text")
        for role in ("append_eos", "prepend_bos"):
            self._source.resolve(getattr(self, role), role)
        made = [name for side in self._sides for name in made_columns(side)]
        pairs = check_keep(self.keep, [*made, *self._picture_columns])
        if all(spec for _, spec in pairs):
            self._set("_types", dict(pairs))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _load_chat(self) -> ChatSettings | None:
        """How rows become conversations; None if they are texts."""
        check_choice("chat_format", self.chat_format, (None, *get_args(ChatFormat)))
        check_choice("loss_on", self.loss_on, get_args(LossOn))
        template = self.chat_template or (True if self.chat_format in ("messages", "sharegpt") else None)
        if template is None and self.chat_format is None:
            if self.processor is not None:
                self._load_pictures(ChatLayout.of("messages", ""), is_rendered=False)
            return None
        layout = ChatLayout.of(self.chat_format or "messages", self.column)
        loaded = template and load_template(
            template,
            self._source,
            self.template_values,
            self.template_date,
            self._guard,
            with_tools=self.tools_column is not None,
        )
        return ChatSettings(
            layout,
            loaded or None,
            self._guard,
            self.tools_column,
            self.loss_on if self.loss_mask else None,
            self._load_pictures(layout, is_rendered=bool(loaded)),
        )

    def _load_pictures(self, layout: ChatLayout, *, is_rendered: bool) -> PictureSettings | None:
        if self.processor is None:
            return None
        if not is_rendered or len(layout.sides) > 1:
            raise ValueError(
                f"processor={os.fspath(self.processor)!r}: pictures are read from conversations with a chat template, "
                "one to a row: chat_format='messages' (--chat-format messages)."
            )
        if not 1 <= self.max_pixels <= DEFAULT_MAX_PIXELS:
            raise ValueError(f"max_pixels={self.max_pixels}; 1 to {DEFAULT_MAX_PIXELS:,} are possible.")
        return PictureSettings(load_expansion(self.processor), self.media_root, self.images_column, self.max_pixels)

    @property
    def _picture_columns(self) -> dict[str, str]:
        pictures = None if self._chat is None else self._chat.pictures
        return {} if pictures is None else pictures.columns()

    @property
    def _sides(self) -> tuple[str, ...]:
        """Names of the conversations in a row; "" if there is only one, or a text."""
        return ("",) if self._chat is None else self._chat.layout.sides

    @property
    def _guard(self) -> Guard | None:
        """None if special tokens are allowed, or there are none."""
        if self.special_tokens == "allow" or not self._source.controls:
            return None
        return Guard(self._source.controls, self.special_tokens)

    @property
    def _engine_source(self) -> TokenizerSource:
        """The tokenizer that engines load."""
        return self._source if self._guard is None else seal_tokenizer(self._source)

    @property
    def _source(self) -> TokenizerSource:
        source: TokenizerSource = self.tokenizer
        return source

    @property
    def eos_id(self) -> int | None:
        """Id that ends each document; None if none is appended."""
        found = self._source.resolve(self.append_eos, "append_eos")
        return found and found[1]

    @property
    def bos_id(self) -> int | None:
        """Id that begins each document; None if none is prepended."""
        found = self._source.resolve(self.prepend_bos, "prepend_bos")
        return found and found[1]

    @property
    def vocab_size(self) -> int:
        """Largest id that can come out, plus one."""
        return max(self._source.vocab_size, 1 + (self.eos_id or 0), 1 + (self.bos_id or 0))

    @property
    def engine_used(self) -> str | None:
        """Engine that `before_run` chose: "gigatoken" or "reference"; None before that."""
        if self._chosen is None:
            return None
        return "gigatoken" if self._chosen.is_fast else "reference"

    @property
    def identity(self) -> dict[str, Any]:
        """The tokenizer's content and every option that changes a token."""
        return {
            "transform": "Tokenize",
            "version": VERSION,
            "tokenizer": self._source.sha256,
            "column": self.column,
            "append_eos": self.eos_id,
            "prepend_bos": self.bos_id,
            "keep": [list(pair) for pair in check_keep(self.keep, ())],
            "chat": self._chat and self._chat.identity,
            # Datasets made before this option existed used "allow", and can be continued with it.
            **({"special_tokens": self.special_tokens} if self._guard else {}),
            # Before, characters that the vocabulary lacks were unknown, not spelled with these.
            **({"bytes": "spelled"} if self._guard and self._source.fallback_bytes else {}),
        }  # fmt: skip

    @property
    def attributes(self) -> dict[str, Any]:
        source = self._source
        facts = {"name": source.name, "kind": source.kind, "sha256": source.sha256, "vocab_size": self.vocab_size}
        for key, role in (("eos", "append_eos"), ("bos", "prepend_bos")):
            added = source.resolve(getattr(self, role), role)  # type: ignore[arg-type]
            token = added[0] if added else source.declared.get(f"{key}_token")
            found = source.specials.get(token) if token else None
            facts |= {
                f"{key}_token": token,
                f"{key}_id": added[1] if added else found,
                f"{key}_added": added is not None,
            }
        if source.controls:
            facts["special_tokens"] = self.special_tokens
        return {"tokenizer": facts}

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the reference is used, what the tokenizer would have added to each text, and who is not learned from."""
        engine = (self._chosen.note,) if self._chosen and self._chosen.note else ()
        return (*engine, *self._note_post_processor(), *self._note_strangers())

    def _note_strangers(self) -> tuple[str, ...]:
        """A note about conversations from which nothing is learned because of what the assistant is called."""
        if not self._strangers or not self.loss_mask:
            return ()
        roles = " and ".join(map(repr, self._strangers))
        return (
            f"Nothing is learned from messages of the role {roles}: only 'assistant' counts. Rename the role; rows "
            "with 'from' and 'value' are chat_format='sharegpt' (--chat-format sharegpt).",
        )

    def _note_post_processor(self) -> tuple[str, ...]:
        """A note if the post-processor would add tokens that were not requested; a chat template writes its own."""
        if self._chat is not None and self._chat.template is not None:
            return ()
        before, after = tokens_around(self._source.kind, self._source.data)
        roles = (("before", before, "prepend_bos", self.bos_id), ("after", after, "append_eos", self.eos_id))
        missing = [
            (side, tokens, role)
            for side, tokens, role, added in roles
            if [self._source.find_id(token, role) for token in tokens] != ([] if added is None else [added]) and tokens
        ]
        if not missing:
            return ()
        would = " and ".join(f"{' '.join(map(repr, tokens))} {side}" for side, tokens, _ in missing)
        flags = ", ".join(f"{role}={tokens[0]!r}" for _, tokens, role in missing if len(tokens) == 1)
        same = f" To add the same: {flags} (--prepend-bos, --append-eos)." if flags else ""
        return (
            f"{self._source.name} has a post-processor that would put {would} each text. It is not run: only "
            f"prepend_bos and append_eos add tokens.{same}",
        )

    @property
    def input_columns(self) -> tuple[str, ...]:
        """The text or conversation, the tools, and kept columns."""
        kept = [name for name, _ in check_keep(self.keep, ())]
        return tuple(dict.fromkeys([*self._read_columns, *self._beside, *kept]))

    @property
    def _beside(self) -> tuple[str, ...]:
        """Columns of conversations beside their messages."""
        images = self.images_column if self.processor is not None else None
        return tuple(filter(None, [self.tools_column, images]))

    @property
    def _read_columns(self) -> tuple[str, ...]:
        """The text, or what makes a conversation."""
        return (self.column,) if self._chat is None else self._chat.layout.columns

    @property
    def exact_columns(self) -> tuple[str, ...]:
        """Conversations and tools: a template writes objects as they are, in their order and with their numbers."""
        return () if self._chat is None else (*self._chat.layout.columns, *self._beside)

    def columns(self) -> dict[str, str] | None:
        """Tokens in the smallest dtype that can hold the vocabulary, the mask, and kept columns."""
        if self._types is None:
            return None
        made: dict[str, str] = {}
        for side in self._sides:
            tokens, loss_mask = made_columns(side)
            made[tokens] = f"{smallest_dtype(self.vocab_size).name}[*]"
            if self._chat is not None and self.loss_mask:
                made[loss_mask] = "bool[*]"
        return {**made, **self._picture_columns, **self._types}

    def before_run(self, sample: Iterable[Records]) -> Tokenize:
        """The same, with an engine chosen by at most 1 MB of the sample, and types for kept columns.

        Raises:
            SchemaError: no row has the column.
        """
        pieces, types, num_bytes = [_NOTHING], self._types, 0
        strangers: set[str] = set()
        for records in self._with_columns(sample):
            if types is None and records.num_rows:
                types = infer_types(check_keep(self.keep, ()), records)
            self._check_tools(records)
            pieces.append(take_sample(self._read_texts(records, strangers), SAMPLE_BYTES - num_bytes))
            num_bytes += len(pieces[-1].values)
            if num_bytes >= SAMPLE_BYTES - _CHARACTER_BYTES:
                break
        ready = copy.copy(self)
        ready._set("_types", types)
        ready._set("_strangers", tuple(sorted(strangers)))
        ready._set("_chosen", choose_engine(self._engine_source, self.engine, Ragged.concatenate(pieces)))
        return ready

    def _with_columns(self, sample: Iterable[Records]) -> Iterator[Records]:
        """Batches in which some row has the columns to read; an error if none of the first ones is such a batch."""
        problem, is_found = None, False
        for number, records in enumerate(sample, 1):
            if absent := find_absent(records, self._read_columns):
                problem = problem or self._describe_absent(absent, records)
                if not is_found and number == _MOST_WITHOUT:
                    break
            else:
                is_found = True
                yield records
        if problem and not is_found:
            raise SchemaError(problem)

    def _describe_absent(self, name: str, records: Records) -> str:
        near, hint = nearest_name(name, records.known), ""
        if near is None or self._chat is not None:
            hint = guess_format(records.known, None if self._chat is None else self._chat.layout.format)
        if not hint and name == self.column:
            meant = near or next((each for each in _USUAL_NAMES if each in records.known), None)
            hint = f" Name the one to read: column={meant or 'NAME'!r} (--column {meant or 'NAME'})."
        return f"There is no field {name!r}.{list_fields(records, name)}{hint}"

    def _check_tools(self, records: Records) -> None:
        """Refuse a column of tools that no row has where another is called nearly so: rows may do without tools."""
        name = self.tools_column
        if name is None or name.partition(".")[0] in records.known:
            return
        if guess := did_you_mean(name, records.known):
            raise ValueError(f"tools_column={name!r} (--tools-column): none of the first rows has it.{guess}")

    def _read_texts(self, records: Records, strangers: set[str]) -> Ragged:
        """Documents of the good rows, as they will be tokenized; adds who speaks in place of the assistant."""
        bad = BadRows(records)
        if self._chat is not None:
            said = self._read_conversations(self._chat, records, bad)
            strangers.update(each.stranger for each in said if each.stranger)
            return join_texts([each.text for each in said])
        rows = read_text(records, self.column, bad)
        if self._guard is not None:
            self._guard.check_documents(rows, bad)
        return rows.take(bad.good_places())

    def _read_conversations(self, chat: ChatSettings, records: Records, bad: BadRows) -> list[Conversation]:
        with ConversationReader(dataclasses.replace(chat, loss_on=None)) as reader:
            rendered = [each for side in chat.layout.sides for each in reader.read(records, side, bad)]
        return [conversation for conversation in rendered if conversation]

    def open(self) -> OpenTransform:
        """Load the tokenizer. Without `before_run`, the engines are compared on the battery first."""
        chosen = self._chosen or choose_engine(self._engine_source, self.engine, _NOTHING)
        maker = TokenMaker(self._engine_source, chosen, self.bos_id, self.eos_id, smallest_dtype(self.vocab_size))
        keep = check_keep(self.keep, ())
        if self._chat is None:
            return OpenTokenize(maker, self.column, keep, self._types, self._guard)
        return OpenChat(maker, self._chat, keep, self._types)


_CHARACTER_BYTES = 4
_NOTHING = Ragged(np.empty(0, np.uint8), np.zeros(1, np.int64))
