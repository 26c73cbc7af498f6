"""Text to tokens: columns, ids, bad rows, what is kept."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import penstock
from penstock.errors import FormatError, SchemaError, StorageError
from penstock.transforms import Output, Tokenize

from .tokenizer_examples import (
    BOS,
    EOS,
    hf_tokenizer,
    library_texts,
    make_records,
    reasons,
    text_records,
    tiktoken_encoding,
    token_lists,
    tokenizer_json,
    write_hf_folder,
    write_tokenizer,
)


def expected_ids(texts: list[str]) -> list[list[int]]:
    """As `tokenizers` does when it is told that text is only text."""
    tokenizer = hf_tokenizer()
    tokenizer.encode_special_tokens = True
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def run(transform: Tokenize, records: Any) -> Output:
    ready = transform.before_run([records])
    return ready.open()(records)


def test_tokens_are_those_of_the_tokenizers_library(tmp_path: Path) -> None:
    texts = [*library_texts(), "héllo 👍🏽", "", "<|eos|> in the text, penstock"]
    output = run(Tokenize(write_tokenizer(tmp_path)), text_records(texts))
    assert token_lists(output) == expected_ids(texts)
    assert output.sources.tolist() == list(range(len(texts)))
    assert output.errors == ()


def test_eos_and_bos_go_around_every_document(tmp_path: Path) -> None:
    transform = Tokenize(write_tokenizer(tmp_path), append_eos=EOS, prepend_bos=BOS)
    eos, bos = hf_tokenizer().token_to_id(EOS), hf_tokenizer().token_to_id(BOS)
    output = run(transform, text_records(["one two", "", "three"]))
    assert token_lists(output) == [[bos, *ids, eos] for ids in expected_ids(["one two", "", "three"])]


def test_an_empty_document_is_kept_with_no_tokens_when_nothing_is_added() -> None:
    output = run(Tokenize(hf_tokenizer()), text_records(["", "a", ""]))
    assert [len(tokens) for tokens in token_lists(output)] == [0, 1, 0]


def test_no_rows_give_no_samples() -> None:
    output = run(Tokenize(hf_tokenizer(), append_eos=EOS), text_records([]))
    assert output.num_samples == 0
    assert len(output.columns["tokens"]) == 0


def test_a_missing_eos_token_is_an_error_that_names_the_added_tokens() -> None:
    with pytest.raises(ValueError, match=r"append_eos='</s>' is not a token of .* added tokens: '<\|eos\|>'"):
        Tokenize(hf_tokenizer(), append_eos="</s>")


def test_true_takes_the_eos_that_a_folder_declares_and_is_refused_without_one(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model")
    assert Tokenize(folder, append_eos=True, prepend_bos=True).eos_id == hf_tokenizer().token_to_id(EOS)
    with pytest.raises(ValueError, match="declares no eos_token"):
        Tokenize(folder / "tokenizer.json", append_eos=True)


def test_the_eos_id_vocabulary_and_hash_are_recorded(tmp_path: Path) -> None:
    told = Tokenize(write_hf_folder(tmp_path / "model"), append_eos=EOS).attributes["tokenizer"]
    assert told["eos_id"] == hf_tokenizer().token_to_id(EOS)
    assert told["eos_added"] is True
    assert told["bos_id"] == hf_tokenizer().token_to_id(BOS)
    assert told["bos_added"] is False
    assert told["vocab_size"] == hf_tokenizer().get_vocab_size()
    assert len(told["sha256"]) == 64
    assert told["name"] == "model"
    json.dumps(told)


def test_the_smallest_dtype_that_holds_the_vocabulary_is_chosen() -> None:
    assert Tokenize("bytes").columns() == {"tokens": "uint8[*]"}
    assert Tokenize("bytes", append_eos="<|eos|>").columns() == {"tokens": "uint16[*]"}
    assert Tokenize(hf_tokenizer()).columns() == {"tokens": "uint16[*]"}
    words = {f"word{number}": number for number in range(70_000)}
    assert Tokenize(Tokenizer(WordLevel(words, unk_token="word0"))).columns() == {"tokens": "uint32[*]"}


def test_bytes_are_their_own_tokens() -> None:
    output = run(Tokenize("bytes", append_eos="<|eos|>", prepend_bos="<|bos|>"), text_records(["hé", ""]))
    assert token_lists(output) == [[257, *"hé".encode(), 256], [257, 256]]
    assert output.columns["tokens"].values.dtype == np.uint16
    plain = run(Tokenize("bytes"), text_records(["hé"]))
    assert plain.columns["tokens"].values.dtype == np.uint8


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary"])
def test_every_arrow_type_of_text_gives_the_same_tokens(kind: str) -> None:
    texts = ["first", "", "naïve 👍", "last"]
    column = pa.array([text.encode() if "binary" in kind else text for text in texts], getattr(pa, kind)())
    sliced = pa.concat_arrays([column, column]).slice(4, 4)
    for each in (column, sliced):
        assert token_lists(run(Tokenize(hf_tokenizer()), make_records({"text": each}))) == expected_ids(texts)


def test_lists_of_text_and_of_bytes_work_like_arrow() -> None:
    texts = ["first", "", "naïve 👍"]
    for column in (texts, [text.encode() for text in texts], [texts[0], b"", texts[2]]):
        assert token_lists(run(Tokenize(hf_tokenizer()), make_records({"text": column}))) == expected_ids(texts)


def test_nulls_are_bad_rows_with_their_row_numbers() -> None:
    output = run(Tokenize(hf_tokenizer(), append_eos=EOS), text_records(["a", None, "b", None], first_row=100))
    assert reasons(output) == [(101, "null"), (103, "null")]
    assert output.sources.tolist() == [0, 2]
    eos = hf_tokenizer().token_to_id(EOS)
    assert token_lists(output) == [[*ids, eos] for ids in expected_ids(["a", "b"])]


def test_row_numbers_are_those_of_the_source_when_rows_are_missing_already() -> None:
    output = run(Tokenize(hf_tokenizer()), make_records({"text": ["a", None, "c"]}, first_row=7, bad_rows=[8]))
    assert reasons(output) == [(9, "null")]


def test_a_column_of_nothing_but_nulls_is_bad_rows_not_an_error() -> None:
    output = run(Tokenize(hf_tokenizer()), make_records({"text": pa.nulls(2)}))
    assert reasons(output) == [(0, "null"), (1, "null")]
    assert output.num_samples == 0


def test_invalid_utf8_is_found_also_when_two_rows_are_valid_only_together() -> None:
    halves = [b"ok", b"\xc3", b"\xa9", b"fine", b"\xff\xfe", b"\xed\xa0\x80", b""]
    output = run(Tokenize(hf_tokenizer()), make_records({"text": pa.array(halves, pa.binary())}))
    assert reasons(output) == [(1, "invalid_utf8"), (2, "invalid_utf8"), (4, "invalid_utf8"), (5, "invalid_utf8")]
    assert token_lists(output) == expected_ids(["ok", "fine", ""])


def test_half_a_surrogate_pair_is_invalid() -> None:
    output = run(Tokenize(hf_tokenizer()), make_records({"text": ["a", "\ud800", "b"]}))
    assert reasons(output) == [(1, "invalid_utf8")]
    assert "surrogate" in output.errors[0].message


def test_values_of_the_wrong_type_are_bad_rows_that_show_the_value() -> None:
    output = run(Tokenize(hf_tokenizer()), make_records({"text": ["a", 7, ["x"], "b"]}))
    assert reasons(output) == [(1, "wrong_type"), (2, "wrong_type")]
    assert "int 7" in output.errors[0].message


def test_a_column_of_numbers_is_refused_as_a_whole() -> None:
    with pytest.raises(SchemaError, match="Column 'text' of the source is int64"):
        run(Tokenize(hf_tokenizer()), make_records({"text": pa.array([1, 2])}))


def test_a_missing_column_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(SchemaError, match="No column 'text' in the source; its columns are 'body'"):
        run(Tokenize(hf_tokenizer()), make_records({"body": ["a"]}))


def test_kept_columns_get_their_types_from_the_first_rows() -> None:
    columns = {
        "text": ["a", "b"],
        "url": pa.array(["x", "yy"]),
        "score": pa.array([0.5, 1.5], pa.float32()),
        "year": pa.array([1999, 2001], pa.int32()),
        "spans": pa.array([[1, 2], []], pa.list_(pa.int64())),
        "good": pa.array([True, False]),
    }
    transform = Tokenize(hf_tokenizer(), keep=["url", "score", "year", "spans", "good"])
    assert transform.columns() is None
    records = make_records(columns)
    ready = transform.before_run([records])
    assert ready.columns() == {
        "tokens": "uint16[*]", "url": "bytes", "score": "float32", "year": "int32", "spans": "int64[*]", "good": "bool"
    }  # fmt: skip
    output = ready.open()(records)
    assert list(output.columns["url"]) == [b"x", b"yy"]
    assert output.columns["year"].tolist() == [1999, 2001]
    assert [span.tolist() for span in output.columns["spans"]] == [[1, 2], []]
    assert ready.identity == transform.identity


def test_a_kept_value_that_does_not_fit_its_type_is_a_bad_row() -> None:
    transform = Tokenize(hf_tokenizer(), keep={"score": "int16"})
    columns = {"text": ["a", "b", "c", "d", "e"], "score": [1, 2.5, None, 70_000, "x"]}
    output = run(transform, make_records(columns))
    assert reasons(output) == [(1, "wrong_type"), (2, "null"), (3, "wrong_type"), (4, "wrong_type")]
    assert output.columns["score"].tolist() == [1]
    assert token_lists(output) == expected_ids(["a"])


def test_a_bad_text_drops_the_kept_values_of_its_row() -> None:
    columns = {"text": ["a", None, "c"], "url": pa.array(["x", "y", "z"]), "n": pa.array([1, 2, 3])}
    output = run(Tokenize(hf_tokenizer(), keep=["url", "n"]), make_records(columns))
    assert list(output.columns["url"]) == [b"x", b"z"]
    assert output.columns["n"].tolist() == [1, 3]


def test_keep_may_not_name_what_the_transform_writes() -> None:
    with pytest.raises(ValueError, match="'tokens' is a column that the transform writes"):
        Tokenize("bytes", keep=["tokens"])
    with pytest.raises(TypeError, match=r"write keep=\['url'\]"):
        Tokenize("bytes", keep="url")


def test_the_output_goes_straight_into_a_dataset(tmp_path: Path) -> None:
    transform = Tokenize(hf_tokenizer(), append_eos=EOS, keep={"url": "bytes"})
    output = run(transform, make_records({"text": ["a b", None, "c"], "url": ["x", "y", "z"]}))
    with penstock.DatasetWriter(tmp_path / "data", transform.columns() or {}) as writer:
        writer.write_batch(output.columns)
    dataset = penstock.open(tmp_path / "data")
    assert [dataset[i]["url"] for i in range(2)] == [b"x", b"z"]
    assert dataset[0]["tokens"].tolist() == token_lists(output)[0]


def test_a_file_a_folder_and_an_object_of_one_tokenizer_have_one_identity(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model")
    identities = [Tokenize(each).identity for each in (folder, folder / "tokenizer.json", str(folder), hf_tokenizer())]
    assert all(identity == identities[0] for identity in identities)
    assert Tokenize(folder, append_eos=EOS).identity != identities[0]
    assert Tokenize(folder, column="body").identity != identities[0]
    other = hf_tokenizer()
    other.add_tokens(["one more"])
    assert Tokenize(other).identity != identities[0]


def test_a_pickled_transform_needs_no_file(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    transform = Tokenize(path, append_eos=EOS)
    path.unlink()
    again = pickle.loads(pickle.dumps(transform.before_run([])))
    assert again.engine_used == "gigatoken"
    assert token_lists(again.open()(text_records(["a b"])))[0][:-1] == expected_ids(["a b"])[0]


def test_a_tiktoken_encoding_gives_tiktokens_tokens() -> None:
    encoding = tiktoken_encoding()
    texts = ["Hello  world\n\n", "naïve 12345", "<|endoftext|> inside", ""]
    transform = Tokenize(encoding, append_eos="<|endoftext|>").before_run([text_records(texts)])
    assert transform.engine_used == "gigatoken", transform.notes
    expected = [[*encoding.encode(text, disallowed_special=()), encoding.eot_token] for text in texts]
    assert token_lists(transform.open()(text_records(texts))) == expected


def test_truncation_and_padding_saved_in_a_tokenizer_are_not_applied() -> None:
    tokenizer = hf_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    for engine in ("reference", "gigatoken"):
        output = run(Tokenize(tokenizer, engine=engine), text_records(["one two three four five six"]))  # type: ignore[arg-type]
        assert token_lists(output) == expected_ids(["one two three four five six"])


def test_dropout_is_refused_because_no_two_runs_would_agree() -> None:
    content = json.loads(tokenizer_json())
    content["model"]["dropout"] = 0.1
    with pytest.raises(FormatError, match="BPE dropout"):
        Tokenize(Tokenizer.from_str(json.dumps(content)))


def test_a_path_that_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        Tokenize("some-org/some-model")


def test_a_folder_without_tokenizer_json_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"not a tokenizer\.json\. tokenizer\.model is a SentencePiece model"):
        Tokenize(tmp_path / "tokenizer.model")
    with pytest.raises(
        FileNotFoundError, match=r"has no tokenizer.json \(it holds tokenizer.model\)\. .*compare the ids"
    ):
        Tokenize(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        "[" * 200_000,
        "[]",
        "{",
        '{"chat_template": [5]}',
        '{"chat_template": [{"name": "default"}]}',
    ],
)
def test_a_folder_whose_declarations_make_no_sense_is_a_format_error(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(FormatError, match=r"tokenizer_config\.json does not say which tokens and template there are"):
        Tokenize(tmp_path)


def test_declarations_that_are_no_text_are_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": 5}, "chat_template": {"a": 1}}')
    with pytest.raises(ValueError, match="append_eos=True"):
        Tokenize(tmp_path, append_eos=True)


def test_an_encoding_that_tiktoken_lacks_is_named_with_those_it_has() -> None:
    with pytest.raises(ValueError, match=r"no encoding 'cl100k'\. Did you mean 'cl100k_base'\? It has cl100k_base, "):
        Tokenize("tiktoken:cl100k")


def test_what_a_post_processor_would_add_is_told_unless_it_is_asked_for() -> None:
    content = json.loads(tokenizer_json())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (BOS, EOS)}
    around = [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    single = [*around, {"SpecialToken": {"id": EOS, "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    tokenizer = Tokenizer.from_str(json.dumps(content))
    [note] = Tokenize(tokenizer).notes
    assert f"would put {BOS!r} before and {EOS!r} after each text. It is not run" in note
    assert f"prepend_bos={BOS!r}, append_eos={EOS!r}" in note
    [note] = Tokenize(tokenizer, prepend_bos=BOS).notes
    assert f"would put {EOS!r} after each text" in note
    exact = Tokenize(tokenizer, prepend_bos=BOS, append_eos=EOS)
    assert exact.notes == ()
    assert token_lists(run(exact, text_records(["some text"]))) == [tokenizer.encode("some text").ids]
    assert Tokenize(hf_tokenizer()).notes == ()


def test_the_reason_for_the_slow_engine_is_told_once_and_in_words(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    [note] = Tokenize(tokenizer).before_run([]).notes
    assert "Using the reference tokenizer" in note
    assert ".rs:" not in note
    assert "Location" not in note
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_no_tokenizer_is_a_format_error(tmp_path: Path) -> None:
    for content in ("{", "{}", '{"model": {"type": "BPE"}}', "\ud7ff"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(FormatError, match=r"is not a tokenizer\.json"):
            Tokenize(tmp_path / "tokenizer.json")


def test_an_object_that_is_no_tokenizer_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="int is not a tokenizer"):
        Tokenize(7)


def test_a_document_of_many_megabytes_is_one_document() -> None:
    text = "".join(library_texts()) * 40
    output = run(Tokenize(hf_tokenizer(), append_eos=EOS), text_records([text, "after"]))
    first, second = token_lists(output)
    assert hf_tokenizer().decode(first[:-1]) == text
    assert second[:-1] == expected_ids(["after"])[0]


@pytest.mark.parametrize("where", ["vocabulary", "added"])
def test_an_id_far_beyond_the_vocabulary_is_refused_before_any_engine_sees_it(tmp_path: Path, where: str) -> None:
    """gigatoken makes a table up to the largest id; where memory does not suffice, it aborts the process."""
    content = json.loads(tokenizer_json())
    if where == "vocabulary":
        content["model"]["vocab"]["zz"] = 2**32 - 1
    else:
        content["added_tokens"][-1]["id"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    program = f"from penstock import Tokenize; Tokenize({str(tmp_path / 'tokenizer.json')!r}).before_run([]).open()"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert "FormatError: tokenizer.json has a token with the id 4,294,967,295, but only 1,00" in done.stderr


def test_gaps_between_ids_are_fine() -> None:
    content = json.loads(tokenizer_json())
    content["model"]["vocab"]["zz"] = 70_000
    assert Tokenize(Tokenizer.from_str(json.dumps(content))).columns() == {"tokens": "uint32[*]"}


class Ended(BaseException):
    """As a signal raises it: a wish to stop, whatever is going on."""


class PanicException(BaseException):
    """As Rust libraries raise it."""


@pytest.mark.parametrize(("raised", "arrives"), [(Ended, Ended), (PanicException, FormatError)])
def test_a_panic_is_a_bad_tokenizer_and_a_wish_to_stop_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], arrives: type[BaseException]
) -> None:
    def from_str(_: str) -> None:
        raise raised("now")

    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_str=from_str))
    monkeypatch.setitem(sys.modules, "tokenizers", library)
    with pytest.raises(arrives, match="now"):
        Tokenize(path).open()


def test_an_encoding_that_tiktoken_cannot_fetch_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> None:
        raise ConnectionError("Max retries exceeded")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(StorageError, match=r"tiktoken:gpt2: .* could not \(ConnectionError\)\. .*TIKTOKEN_CACHE_DIR"):
        Tokenize("tiktoken:gpt2")
