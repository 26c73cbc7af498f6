"""Conversations to tokens and a loss mask: templates, sandbox, marks, prefixes, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import MissingExtra, SchemaError
from penstock.transforms import Output, Tokenize

from .tokenizer_examples import (
    BOS,
    EOS,
    hf_tokenizer,
    make_records,
    reasons,
    tiktoken_encoding,
    token_lists,
    write_hf_folder,
)

PLAIN = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' %}\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{%- else %}\n{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
# As reasoning models do: what an earlier turn thought is dropped as soon as there is a later one.
FORGETFUL = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if loop.last and message.thought is defined %}{{ message.thought }}{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello   there, naïve 👍!\n    indented"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye"},
]


def run(messages: list[Any], template: str | None = PLAIN, tokenizer: Any = None, **options: Any) -> Output:
    transform = Tokenize(tokenizer or hf_tokenizer(), chat_template=template, **options)
    records = make_records({"messages": messages})
    return transform.before_run([records]).open()(records)


def said(output: Output, document: int = 0) -> str:
    """Text of the tokens that the mask chooses."""
    tokens, mask = output.columns["tokens"], output.columns["loss_mask"]
    assert tokens.offsets.tolist() == mask.offsets.tolist()
    chosen = np.asarray(tokens[document])[np.asarray(mask[document])]
    return str(hf_tokenizer().decode(chosen.tolist(), skip_special_tokens=False))


def test_tokens_are_those_of_the_rendered_text() -> None:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
    assert token_lists(run([TALK])) == [hf_tokenizer().encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize("engine", ["gigatoken", "reference"])
def test_prefix_rendering_finds_what_the_assistant_said(engine: Literal["gigatoken", "reference"]) -> None:
    output = run([TALK], engine=engine)
    assert said(output) == "Hello   there, naïve 👍!\n    indented<|im_end|>\nBye<|im_end|>\n"
    assert output.columns["loss_mask"].values.dtype == np.bool_


@pytest.mark.parametrize("engine", ["gigatoken", "reference"])
def test_generation_marks_find_what_the_assistant_said(engine: Literal["gigatoken", "reference"]) -> None:
    assert said(run([TALK], MARKED, engine=engine)) == "Hello   there, naïve 👍!\n    indented<|im_end|>Bye<|im_end|>"


def test_both_engines_give_the_same_mask() -> None:
    talks = [
        TALK,
        TALK[:3],
        TALK[:2],
        [{"role": "user", "content": "  \n\n  "}, {"role": "assistant", "content": "   x"}],
    ]
    for template in (PLAIN, MARKED):
        masks = [run(talks, template, engine=engine).columns["loss_mask"] for engine in ("gigatoken", "reference")]
        assert np.array_equal(masks[0].values, masks[1].values)


def test_marked_text_is_the_same_as_the_text_without_marks() -> None:
    without = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert token_lists(run([TALK], MARKED)) == token_lists(run([TALK], without, loss_mask=False))


# As TRL's training templates mark it: the end of a turn and its newline belong to the turn.
MARKED_AS_TRL = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)


@pytest.fixture
def fast_tokenizers() -> Any:
    """The tokenizers of transformers, which takes seconds to import: not where these tests are only collected."""
    import transformers

    return transformers.PreTrainedTokenizerFast


@pytest.mark.parametrize("template", [MARKED, MARKED_AS_TRL])
def test_the_mask_of_a_marked_template_is_that_of_transformers(template: str, fast_tokenizers: Any) -> None:
    tokenizer = fast_tokenizers(tokenizer_object=hf_tokenizer())
    for talk in (TALK, TALK[:3]):
        expected = tokenizer.apply_chat_template(
            talk, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        output = run([talk], template)
        assert token_lists(output) == [expected["input_ids"]]
        assert np.asarray(output.columns["loss_mask"][0]).astype(int).tolist() == expected["assistant_masks"]


def test_without_marks_the_mask_is_that_of_transformers_with_trls_marks(fast_tokenizers: Any) -> None:
    tokenizer = fast_tokenizers(tokenizer_object=hf_tokenizer())
    expected = tokenizer.apply_chat_template(
        TALK, chat_template=MARKED_AS_TRL, return_dict=True, return_assistant_tokens_mask=True
    )
    output = run([TALK], PLAIN)
    assert token_lists(output) == [expected["input_ids"]]
    assert np.asarray(output.columns["loss_mask"][0]).astype(int).tolist() == expected["assistant_masks"]


def test_a_conversation_without_the_assistant_has_an_empty_mask_and_is_counted() -> None:
    for template in (PLAIN, MARKED):
        output = run([TALK[:2], TALK, TALK[:1]], template)
        assert said(output) == ""
        assert output.noticed == {"conversations_without_a_token_to_learn": 2}
        assert run([TALK], template).noticed == {}


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_reason() -> None:
    talk = [{**message, "thought": "hm"} if message["role"] == "assistant" else message for message in TALK]
    output = run([talk, TALK[1:3]], FORGETFUL)
    assert reasons(output) == [(0, "chat_template")]
    assert "rendering of turns 0 to 2 is not the beginning of the whole" in output.errors[0].message
    assert "loss_mask=False" in output.errors[0].message
    assert output.sources.tolist() == [1]
    assert run([talk], FORGETFUL, loss_mask=False).num_samples == 1


def test_marks_that_miss_the_assistant_are_refused() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'robot' %}"
        "{% generation %}x{% endgeneration %}{% endif %}{% endfor %}"
    )
    assert reasons(run([TALK], template)) == [(0, "chat_template")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "text", "text": "Yes"}], "writes a content of parts as [{'type': 'text', 'text': 'Yes'}]; give"),
        (None, "writes None for a message without content"),
    ],
)
def test_content_that_is_no_text_is_not_written_as_python_writes_it(content: Any, message: str) -> None:
    said_none = {"role": "user", "content": "None"}
    talk = [said_none, {"role": "assistant", "content": content, "tool_calls": [{"name": "getNone"}]}]
    output = run([talk])
    assert reasons(output) == [(0, "chat_template")]
    assert message in output.errors[0].message
    reads_it = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}"
        "{{ message.tool_calls[0].name }}{% endif %}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert said(run([talk], reads_it)).endswith("None<|im_end|>\n")


def test_text_that_holds_the_marking_characters_is_refused() -> None:
    talk = [{"role": "assistant", "content": "a\ufdd0b"}]
    output = run([talk], MARKED)
    assert reasons(output) == [(0, "chat_template")]
    assert "cannot be located" in output.errors[0].message


def test_a_template_that_looks_at_its_own_output_is_refused() -> None:
    template = (
        "{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}{{ x }} {{ x | length }}"
    )
    output = run([[{"role": "assistant", "content": "abc"}]], template)
    assert "differs from the plain one" in output.errors[0].message


def test_appended_eos_is_learnt_only_after_the_assistant() -> None:
    output = run([TALK, TALK[:2]], append_eos=EOS, prepend_bos=BOS)
    masks = [np.asarray(mask).tolist() for mask in output.columns["loss_mask"]]
    assert [mask[0] for mask in masks] == [False, False]
    assert [mask[-1] for mask in masks] == [True, False]
    eos = hf_tokenizer().token_to_id(EOS)
    assert [tokens[-1] for tokens in token_lists(output)] == [eos, eos]


def test_without_a_mask_there_is_no_mask_column() -> None:
    transform = Tokenize(hf_tokenizer(), chat_template=PLAIN, loss_mask=False)
    assert transform.columns() == {"tokens": "uint16[*]"}
    assert list(run([TALK], loss_mask=False).columns) == ["tokens"]
    assert Tokenize(hf_tokenizer(), chat_template=PLAIN).columns() == {"tokens": "uint16[*]", "loss_mask": "bool[*]"}


def test_arrow_messages_lose_the_fields_that_arrow_filled_with_nulls() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.calls is defined %}!{% endif %}{% endfor %}"
    talks = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "calls": "c"}]]
    output = make_records({"messages": pa.array(talks)})
    ready = Tokenize("bytes", chat_template=template, loss_mask=False).open()
    assert bytes(token_lists(ready(output))[0]) == b"user:aassistant:b!"


def test_arguments_of_tools_lose_the_fields_that_arrow_filled_with_nulls() -> None:
    calls = [
        {"arguments": {"city": "Bern"}},
        {"arguments": {"content": "y", "path": "x"}},
    ]  # in an order that every Arrow keeps
    talks = [[{"role": "assistant", "content": None, "tool_calls": [call]}] for call in calls]
    template = "{{ messages[0].content is none }}{{ messages[0].tool_calls | tojson }}{{ tools | tojson }}"
    ready = Tokenize("bytes", chat_template=template, tools_column="tools", loss_mask=False).open()
    output = ready(make_records({"messages": pa.array(talks), "tools": pa.array([[call] for call in calls])}))
    expected = [f"True{json.dumps([call])}{json.dumps([call])}" for call in calls]
    assert [bytes(tokens).decode() for tokens in token_lists(output)] == expected


def test_objects_stay_in_the_order_and_with_the_numbers_of_their_own_row(tmp_path: Path, inline: None) -> None:
    calls = [{"b": 1, "a": "x"}, {"a": "y", "b": 2.5}, {"a": 3, "c": [1, 2.5]}]
    rows = [
        {"data": {"messages": [{"role": "assistant", "content": "", "calls": [call]}]}, "tools": [call]}
        for call in calls
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{{ messages[0].calls | tojson }}{{ tools | tojson }}"
    transform = Tokenize("bytes", "data.messages", chat_template=template, tools_column="tools", loss_mask=False)
    for name, source in (("lines", path), ("rows", rows)):
        penstock.prepare(source, tmp_path / name, transform=transform, workers=1)
        texts = [bytes(sample["tokens"].astype(np.uint8)).decode() for sample in penstock.open(tmp_path / name)]
        assert texts == [json.dumps([call]) * 2 for call in calls]


def test_python_rows_that_json_cannot_hold_are_read_as_arrow_reads_them(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Hi", "number": np.int64(number)}]} for number in range(2)]
    transform = Tokenize("bytes", chat_template="{{ messages[0].number + 1 }}", loss_mask=False)
    penstock.prepare(rows, tmp_path / "rows", transform=transform)
    assert [bytes(sample["tokens"].astype(np.uint8)) for sample in penstock.open(tmp_path / "rows")] == [b"1", b"2"]


def test_messages_may_be_json_text() -> None:
    assert token_lists(run([json.dumps(TALK)])) == token_lists(run([TALK]))


def test_rows_that_are_no_conversations_are_bad_rows() -> None:
    talks = [None, [], "not json", 7, ["hi"], [{"content": "no role"}], [{"role": "user"}], TALK]
    talks += [[{"role": "user", "content": "\ud800"}]]
    output = run(talks)
    expected = ["null", "empty", "wrong_type", "wrong_type", "wrong_type", "wrong_type", "empty", "invalid_utf8"]
    assert reasons(output) == list(zip([0, 1, 2, 3, 4, 5, 6, 8], expected, strict=True))
    assert output.sources.tolist() == [7]


def test_a_template_that_raises_is_a_bad_row_with_its_message() -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('must start with system') }}{% endif %}" + PLAIN
    output = run([TALK, TALK[1:]], template)
    assert reasons(output) == [(1, "chat_template")]
    assert "must start with system" in output.errors[0].message


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ 'x' * 100000000 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_the_sandbox_stops_code_in_templates(attack: str) -> None:
    talk = [dict(message) for message in TALK]
    output = run([talk], attack, loss_mask=False)
    assert reasons(output) == [(0, "chat_template")]
    assert talk == TALK


def test_the_date_is_given_or_refused_but_never_todays() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    output = run([TALK], template, loss_mask=False)
    assert "template_date='YYYY-MM-DD'" in output.errors[0].message
    opened = Tokenize("bytes", chat_template=template, loss_mask=False, template_date="2026-07-01").open()
    assert bytes(token_lists(opened(make_records({"messages": [TALK]})))[0]) == b"01 Jul 2026"
    with pytest.raises(ValueError, match="a date such as"):
        Tokenize("bytes", chat_template=template, template_date="yesterday")


def test_helpers_that_templates_expect_are_there() -> None:
    template = (
        "{{ bos_token }}{{ tools | tojson }}{{ flag }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson(indent=1) }}{% endfor %}"
    )
    records = make_records({"messages": [[{"role": "user", "content": "é<"}]], "tools": [[{"name": "f"}]]})
    transform = Tokenize(
        "bytes", chat_template=template, loss_mask=False, template_values={"flag": False}, tools_column="tools"
    )
    text = bytes(token_lists(transform.open()(records))[0]).decode()
    assert text == '[{"name": "f"}]False{\n "role": "user",\n "content": "é<"\n}'


def test_the_template_comes_from_a_folder_a_file_or_text(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(PLAIN)
    folder = write_hf_folder(tmp_path / "model", chat_template=PLAIN)
    named = write_hf_folder(
        tmp_path / "named",
        chat_template=[{"name": "tool_use", "template": "x"}, {"name": "default", "template": PLAIN}],
    )
    beside = write_hf_folder(tmp_path / "beside")
    (beside / "chat_template.jinja").write_text(PLAIN)
    transforms = [Tokenize(each, chat_template=True) for each in (folder, named, beside)]
    transforms += [
        Tokenize(folder, chat_template=each) for each in (PLAIN, tmp_path / "t.jinja", str(tmp_path / "t.jinja"))
    ]
    assert all(transform.identity == transforms[0].identity for transform in transforms)
    assert transforms[0].column == "messages"


VARIABLES = (
    "{{ bos_token }}{{ pad_token }}{{ unk_token }}{{ documents is none }}"
    "{% for message in messages %}{{ message.role }}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"
)


def test_templates_have_the_variables_that_transformers_gives_them(tmp_path: Path, fast_tokenizers: Any) -> None:
    folder = write_hf_folder(tmp_path / "model", eos_token=EOS, pad_token="<|im_end|>", chat_template=VARIABLES)
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "<|im_start|>"}}))
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    theirs = fast_tokenizers.from_pretrained(folder)
    expected = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    for tokenizer in (folder, theirs):
        output = run([talk], None, tokenizer, chat_format="messages")
        assert token_lists(output) == [expected["input_ids"]]
        assert np.asarray(output.columns["loss_mask"][0]).tolist() == list(map(bool, expected["assistant_masks"]))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_every_name_that_templates_read(name: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    talk = [{"role": "user", "content": "a", name: None}, {"role": "assistant", "content": "b", name: "c"}]
    assert bytes(token_lists(run([talk], template, "bytes", loss_mask=False))[0]) == b"abcc"


def test_a_tokenizer_may_have_another_template_for_tools(tmp_path: Path, fast_tokenizers: Any) -> None:
    templates = {"default": "plain", "tool_use": "{{ tools | tojson }}{% generation %}x{% endgeneration %}"}
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    folder = write_hf_folder(tmp_path / "listed", eos_token=EOS, chat_template=listed)
    files = write_hf_folder(tmp_path / "files")
    (files / "chat_template.jinja").write_text(templates["default"])
    (files / "additional_chat_templates").mkdir()
    (files / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
    theirs = fast_tokenizers.from_pretrained(folder)
    talk, tools = [{"role": "assistant", "content": "Hi"}], [None, [{"name": "f"}]]
    records = make_records({"messages": [talk, talk], "tools": tools})
    expected = [theirs.apply_chat_template(talk, each, return_dict=True)["input_ids"] for each in tools]
    for tokenizer in (folder, files, theirs):
        transform = Tokenize(tokenizer, chat_format="messages", tools_column="tools", loss_mask=False)
        assert token_lists(transform.before_run([records]).open()(records)) == expected
        assert "tool_template" in transform.identity["chat"]
        assert "tool_template" not in Tokenize(tokenizer, chat_format="messages").identity["chat"]


def test_a_template_that_is_missing_or_broken_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template;"):
        Tokenize(hf_tokenizer(), chat_template=True)
    with pytest.raises(FileNotFoundError, match=r"No chat template at 'nowhere\.jinja'"):
        Tokenize(hf_tokenizer(), chat_template="nowhere.jinja")
    with pytest.raises(ValueError, match="not valid Jinja: line 2"):
        Tokenize(hf_tokenizer(), chat_template="{{ 1 }}\n{% for %}")


def test_the_template_and_its_options_are_part_of_the_identity() -> None:
    base = Tokenize("bytes", chat_template=PLAIN)
    assert base.identity != Tokenize("bytes", chat_template=MARKED).identity
    assert base.identity != Tokenize("bytes", chat_template=PLAIN, loss_mask=False).identity
    assert base.identity != Tokenize("bytes", chat_template=PLAIN, template_values={"a": 1}).identity
    assert base.identity != Tokenize("bytes", chat_template=PLAIN, template_date="2026-01-01").identity
    json.dumps(base.identity)


def test_a_missing_messages_column_is_an_error() -> None:
    with pytest.raises(SchemaError, match="No column 'messages'"):
        Tokenize("bytes", chat_template=PLAIN).open()(make_records({"text": ["a"]}))


def test_bytes_and_tiktoken_have_masks_too() -> None:
    opened = Tokenize("bytes", chat_template=PLAIN).open()
    output = opened(make_records({"messages": [TALK]}))
    tokens, mask = np.asarray(output.columns["tokens"][0]), np.asarray(output.columns["loss_mask"][0])
    expected = "Hello   there, naïve 👍!\n    indented<|im_end|>\nBye<|im_end|>\n"
    assert tokens[mask].tobytes().decode() == expected
    for engine in ("gigatoken", "reference"):
        ready = run([TALK], tokenizer=tiktoken_encoding(), engine=engine)
        chosen = np.asarray(ready.columns["tokens"][0])[np.asarray(ready.columns["loss_mask"][0])]
        assert expected in tiktoken_encoding().decode(chosen.tolist())


def test_without_jinja_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"penstock-data\[text\]"):
        Tokenize("bytes", chat_template="{{ never_compiled_before }}")
