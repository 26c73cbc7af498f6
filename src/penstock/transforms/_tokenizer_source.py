"""Which tokenizer: read once, carried as bytes, identified by a hash.

Whatever the caller has (a file, a folder, an object, a name) becomes a `TokenizerSource`, which holds the content
itself: a worker on another machine needs no path, and a file that changes during a run does not affect it.
Nothing is downloaded. Ids of EOS and BOS are looked up, never guessed.
"""

import base64
import functools
import hashlib
import importlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import FormatError, MissingExtra, StorageError, did_you_mean
from penstock.filesystem import local_path, similar_path

BYTES_EOS, BYTES_BOS = "<|eos|>", "<|bos|>"
_BYTES_SPECIALS = {BYTES_EOS: 256, BYTES_BOS: 257}
TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names under which a tokenizer declares tokens, and chat templates know them."""
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_TIKTOKEN_PREFIX = "tiktoken:"
_SENTENCEPIECE_SUFFIX = ".model"
_CONVERT = "Convert it once with transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
_SHOWN_TOKENS = 12
_TOOL_TEMPLATE = "tool_use"
_FREE_IDS = 1 << 20
_IDS_PER_TOKEN = 8


def import_text(package: str) -> Any:
    """Import a package of the extra `text`.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(f"This tokenizer needs {package} ({error}): pip install 'penstock-data[text]'.") from None


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer as data: picklable, comparable, the same everywhere."""

    kind: Literal["json", "tiktoken", "bytes"]
    """A Hugging Face `tokenizer.json`, a tiktoken encoding, or one token per byte."""
    name: str
    """Only for people to read."""
    data: bytes = field(default=b"", repr=False)
    """Content of tokenizer.json, or tiktoken's ranks as JSON."""
    sha256: str = ""
    """Hash of the content: the same for a file and for the object loaded from it."""
    vocab_size: int = 256
    """Largest id plus one, added tokens included."""
    specials: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Added tokens and their ids."""
    controls: frozenset[str] = field(default=frozenset(), repr=False)
    """Those of them that are special: the libraries would turn them into control tokens even in ordinary text."""
    fallback_bytes: frozenset[str] = field(default=frozenset(), repr=False)
    """Those that are flagged special, but with which the model spells characters that it lacks: `<0x0A>`."""
    declared: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What else a folder declares: "eos_token" and other `TOKEN_ROLES`, "chat_template", and "tool_template" if it has
    another one for conversations with tools."""

    def find_id(self, token: str, role: str) -> int:
        """Id of one token.

        Raises:
            ValueError: the vocabulary has no such token.
        """
        found = self.specials.get(token)
        if found is None:
            found = _ids_of_content(self.kind, self.data).get(token)
        if found is None:
            shown = ", ".join(map(repr, list(self.specials)[:_SHOWN_TOKENS])) or "none"
            raise ValueError(
                f"{role}={token!r} is not a token of {self.name}, which has {self.vocab_size:,}. "
                f"Its added tokens: {shown}. Name one of them, or add the token to the tokenizer."
            )
        return found

    def resolve(self, wanted: str | bool | None, role: Literal["append_eos", "prepend_bos"]) -> tuple[str, int] | None:
        """Token and id for `append_eos` or `prepend_bos`; True means the one that the folder declares."""
        if wanted is None or wanted is False:
            return None
        declared = "eos_token" if role == "append_eos" else "bos_token"
        token = self.declared.get(declared) if wanted is True else wanted
        if token is None:
            raise ValueError(
                f"{role}=True, but {self.name} declares no {declared} (only a folder with tokenizer_config.json can). "
                f"Write the token itself, as in {role}='<|endoftext|>'."
            )
        return token, self.find_id(token, role)


def hash_content(content: Mapping[str, Any]) -> str:
    """Hash of a tokenizer in one canonical form, without truncation and padding, which are never used."""
    used = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(used, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_tokenizer(tokenizer: Any) -> TokenizerSource:
    """A tokenizer from a path, a folder, "bytes", "tiktoken:NAME", or an object of `tokenizers` or `tiktoken`.

    Raises:
        FileNotFoundError: no such file.
        FormatError: the file is not a tokenizer that can be used.
        TypeError: an object that is not a tokenizer.
    """
    if isinstance(tokenizer, TokenizerSource):
        return tokenizer
    if isinstance(tokenizer, (str, os.PathLike)):
        return _load_named(os.fspath(tokenizer))
    package = type(tokenizer).__module__.partition(".")[0]
    if package == "tokenizers" and hasattr(tokenizer, "to_str"):
        return _load_json("tokenizers.Tokenizer", tokenizer.to_str().encode(), {})
    if package == "tiktoken":
        return _load_tiktoken(tokenizer)
    if package == "transformers" and hasattr(tokenizer, "backend_tokenizer"):
        return _load_transformers(tokenizer)
    raise TypeError(
        f"{type(tokenizer).__name__} is not a tokenizer Penstock knows: give a tokenizer.json, a folder with one, "
        f"a tokenizers.Tokenizer, a tiktoken encoding, 'tiktoken:cl100k_base' or 'bytes'."
    )


def make_encoding(source: TokenizerSource) -> Any:
    """The `tiktoken.Encoding` that a source of that kind describes."""
    content = json.loads(source.data)
    ranks = {base64.b64decode(token): rank for token, rank in content["ranks"].items()}
    return import_text("tiktoken").Encoding(
        source.name, pat_str=content["pattern"], mergeable_ranks=ranks, special_tokens=content["specials"]
    )


def _load_named(name: str) -> TokenizerSource:
    if name == "bytes":
        return TokenizerSource("bytes", "bytes", sha256=hash_content(_BYTES_SPECIALS), specials=_BYTES_SPECIALS)
    if name.startswith(_TIKTOKEN_PREFIX):
        return _load_tiktoken(_get_encoding(name.removeprefix(_TIKTOKEN_PREFIX)))
    path = local_path(name, "a tokenizer")
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"No tokenizer at {name!r}.{similar_path(path)} Give a tokenizer.json or a folder with one; nothing is "
            "downloaded, so fetch it first "
            "(hf download REPOSITORY tokenizer.json tokenizer_config.json --local-dir FOLDER)."
        )
    if path.name.endswith(_SENTENCEPIECE_SUFFIX):
        raise FormatError(f"{path}: not a tokenizer.json. {_advise_on_sentencepiece(path.name)}")
    return _load_json(path.name, path.read_bytes(), {})


def _get_encoding(name: str) -> Any:
    tiktoken = import_text("tiktoken")
    known = tiktoken.list_encoding_names()
    if name not in known:
        has = ", ".join(sorted(known))
        raise ValueError(f"tiktoken has no encoding {name!r}.{did_you_mean(name, known)} It has {has}.")
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # exceptions of requests are OSErrors, too
        raise StorageError(
            f"tiktoken:{name}: tiktoken fetches an encoding when it is first used, and could not "
            f"({type(error).__name__}). Fetch it on a machine with a network, and set TIKTOKEN_CACHE_DIR to the "
            "folder that holds it; or give a tokenizer.json."
        ) from error


def _load_folder(folder: Path) -> TokenizerSource:
    path = folder / "tokenizer.json"
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir())
        found = ", ".join(names[:_SHOWN_TOKENS]) or "nothing"
        model = next((name for name in names if name.endswith(_SENTENCEPIECE_SUFFIX)), None)
        advice = _advise_on_sentencepiece(model) if model else _CONVERT
        raise FileNotFoundError(f"{folder} has no tokenizer.json (it holds {found}). {advice}")
    return _load_json(folder.resolve().name, path.read_bytes(), _read_declarations(folder))


def _advise_on_sentencepiece(name: str) -> str:
    """What to do about a model that only SentencePiece reads: conversions are not automatically exact."""
    return (
        f"{name} is a SentencePiece model. Use the tokenizer.json of the same model if there is one; if not, put its "
        "tokenizer_config.json beside it (without it, the space that SentencePiece puts before a text is lost) and "
        "convert it: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER). Then compare the ids "
        "with sentencepiece.SentencePieceProcessor(model_file=...).encode(text), including texts that begin with "
        "spaces or contain several in a row: a conversion may still differ there."
    )


def _read_declarations(folder: Path) -> dict[str, str]:
    """EOS and other tokens, and chat templates, from tokenizer_config.json and the files beside it."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        tokens = {**config, **_read_older_tokens(folder, config)}
        declared = {key: _token_text(tokens.get(key)) for key in TOKEN_ROLES}
        declared |= _pick_templates(config.get("chat_template")) | _read_templates(folder)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path} does not say which tokens and template there are ({type(error).__name__}: {error}). "
            "Fetch the file again, or remove it and name them yourself."
        ) from None
    return {key: value for key, value in declared.items() if isinstance(value, str)}


def _token_text(token: Any) -> str | None:
    """A token is written as a string, or as an object with its content."""
    return token.get("content") if isinstance(token, Mapping) else token


def _read_older_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens in special_tokens_map.json, which count, as in transformers, unless the configuration lists all."""
    path = folder / "special_tokens_map.json"
    if "added_tokens_decoder" in config or not path.is_file():
        return {}
    tokens: dict[str, Any] = json.loads(path.read_bytes())
    return tokens


def _read_templates(folder: Path) -> dict[str, str]:
    """Chat templates that are files of their own."""
    paths = {
        "chat_template": folder / "chat_template.jinja",
        "tool_template": folder / "additional_chat_templates" / f"{_TOOL_TEMPLATE}.jinja",
    }
    return {key: path.read_text("utf-8") for key, path in paths.items() if path.is_file()}


def _pick_templates(template: Any) -> dict[str, Any]:
    """The template to use, and the one for conversations with tools: there may be several, by name."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, Mapping):
        return {"chat_template": template.get("default"), "tool_template": template.get(_TOOL_TEMPLATE)}
    return {"chat_template": template}


def _load_transformers(tokenizer: Any) -> TokenizerSource:
    # Asking for an attribute that is not set would log an error.
    tokens = {key: str(token) for key, token in tokenizer.special_tokens_map.items() if key in TOKEN_ROLES}
    templates = _pick_templates(getattr(tokenizer, "chat_template", None))
    declared = {**tokens, **{key: text for key, text in templates.items() if isinstance(text, str)}}
    return _load_json(str(tokenizer.name_or_path), tokenizer.backend_tokenizer.to_str().encode(), declared)


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked; anything else that is not an `Exception` is a request to stop."""
    return type(error).__name__ == "PanicException"


def _load_json(name: str, data: bytes, declared: Mapping[str, str]) -> TokenizerSource:
    try:
        content = json.loads(data)
        _check_ids(name, _ids_in(content))
        loaded = import_text("tokenizers").Tokenizer.from_str(data.decode())
    except (MissingExtra, FormatError, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics are not even that
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise FormatError(f"{name} is not a tokenizer.json that `tokenizers` can load: {error}") from None
    if (content.get("model") or {}).get("dropout"):
        raise FormatError(
            f"{name} has BPE dropout {content['model']['dropout']}, so no two runs would give the same. Set it to 0."
        )
    ids = loaded.get_vocab(with_added_tokens=True)
    added = loaded.get_added_tokens_decoder()
    special = frozenset(token.content for token in added.values() if token.special)
    fallback_bytes = special & _BYTE_TOKENS if content["model"].get("byte_fallback") else frozenset()
    return TokenizerSource(
        "json",
        name,
        data,
        hash_content(content),
        vocab_size=max(ids.values(), default=-1) + 1,
        specials={token.content: index for index, token in added.items()},
        controls=special - fallback_bytes,
        fallback_bytes=fallback_bytes,
        declared=dict(declared),
    )


@functools.lru_cache(maxsize=2)
def tokens_around(source_kind: str, data: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens that the tokenizer's own post-processor puts before and after a text."""
    if source_kind != "json" or not json.loads(data).get("post_processor"):
        return (), ()
    loaded = import_text("tokenizers").Tokenizer.from_str(data.decode())
    loaded.no_truncation()
    loaded.no_padding()
    plain, full = loaded.encode("a", add_special_tokens=False), loaded.encode("a")
    for begin in range(len(full.ids) - len(plain.ids) + 1):
        end = begin + len(plain.ids)
        if full.ids[begin:end] == plain.ids:
            return tuple(full.tokens[:begin]), tuple(full.tokens[end:])
    return (), ()


def _ids_in(content: Mapping[str, Any]) -> list[int]:
    """Ids that a tokenizer.json states explicitly; in a list, a token's place is its id."""
    vocabulary = content["model"].get("vocab")
    named = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    return [*named, *(token["id"] for token in content.get("added_tokens") or ())]


def _check_ids(name: str, ids: Collection[int]) -> None:
    """Refuse ids far above the number of tokens: engines allocate tables up to the largest, or abort."""
    limit = max(_FREE_IDS, _IDS_PER_TOKEN * len(ids))
    largest = max(ids, default=0)
    if largest >= limit:
        raise FormatError(
            f"{name} has a token with the id {largest:,}, but only {len(ids):,} tokens; ids should be below {limit:,}. "
            "The file is damaged or not to be trusted."
        )


def _load_tiktoken(encoding: Any) -> TokenizerSource:
    ranks = {base64.b64encode(token).decode(): rank for token, rank in encoding._mergeable_ranks.items()}
    specials = dict(encoding._special_tokens)
    _check_ids(encoding.name, [*ranks.values(), *specials.values()])
    content = {"pattern": encoding._pat_str, "ranks": ranks, "specials": specials}
    return TokenizerSource(
        "tiktoken",
        encoding.name,
        json.dumps(content).encode(),
        hash_content(content),
        vocab_size=encoding.n_vocab,
        specials=specials,
        controls=frozenset(specials),
    )


@functools.lru_cache(maxsize=2)
def _ids_of_content(kind: str, data: bytes) -> dict[str, int]:
    if kind == "json":
        ids: dict[str, int] = import_text("tokenizers").Tokenizer.from_str(data.decode()).get_vocab(True)
        return ids
    ranks = json.loads(data)["ranks"] if data else {}
    return {base64.b64decode(token).decode("utf-8", "replace"): rank for token, rank in ranks.items()}
