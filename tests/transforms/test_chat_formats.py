"""Layouts of fine-tuning data: what they mean in messages, what is learned from, and text that never controls."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.cli import main
from penstock.errors import SchemaError
from penstock.sources import Records
from penstock.transforms import Output, Tokenize

from .test_chat import MARKED, PLAIN, TALK
from .tokenizer_examples import hf_tokenizer, make_records, reasons, write_hf_folder

SHARED: dict[str, Any] = {"chat_format": "sharegpt", "chat_template": PLAIN}
PROMPT: dict[str, Any] = {"chat_format": "prompt"}
PAIR: dict[str, Any] = {"chat_format": "preference", "chat_template": PLAIN}
SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": SPEAKERS[each["role"]], "value": each["content"]} for each in TALK]
GOOD, BAD = [{"role": "assistant", "content": "Yes!"}], [{"role": "assistant", "content": "No."}]


def run(columns: dict[str, Any], **options: Any) -> Output:
    transform = Tokenize(hf_tokenizer(), **options)
    records = make_records(columns)
    ready = transform.before_run([records])
    output = ready.open()(records)
    assert {**(ready.columns() or {})}.keys() == output.columns.keys()
    return output


def text(output: Output, column: str = "tokens", row: int = 0) -> str:
    return str(hf_tokenizer().decode(np.asarray(output.columns[column][row]).tolist(), skip_special_tokens=False))


def learned(output: Output, column: str = "tokens", row: int = 0) -> str:
    mask = "loss_mask" if column == "tokens" else f"{column}_loss_mask"
    chosen = np.asarray(output.columns[column][row])[np.asarray(output.columns[mask][row])]
    return str(hf_tokenizer().decode(chosen.tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_sharegpt_is_the_same_conversation_in_other_words(template: str) -> None:
    expected = run({"messages": [TALK]}, chat_template=template)
    found = run({"conversations": [SHAREGPT]}, chat_template=template, chat_format="sharegpt")
    for name in ("tokens", "loss_mask"):
        assert np.array_equal(found.columns[name].values, expected.columns[name].values)


roles = st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=6)


ANSWERS = ("chosen", "rejected")
AS_JSON = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
"""Writes one line per message, of which the model may learn those of the assistant."""


def lines_of(layout: str, row: dict[str, Any], side: str) -> tuple[list[Any], list[Any]]:
    """The messages that a template is given for a row, and those of them that are learned."""
    records = make_records({name: [value] for name, value in row.items()})
    output = Tokenize("bytes", chat_format=layout, chat_template=AS_JSON).open()(records)  # type: ignore[arg-type]
    assert not output.errors
    tokens, mask = (side, f"{side}_loss_mask") if side else ("tokens", "loss_mask")
    values, chosen = np.asarray(output.columns[tokens][0]), np.asarray(output.columns[mask][0])
    return tuple([json.loads(line) for line in bytes(each.tolist()).splitlines()] for each in (values, values[chosen]))  # type: ignore[return-value]


@settings(max_examples=25, deadline=None)
@given(roles=roles, num_given=st.integers(0, 5), words=st.text(max_size=8))
def test_any_layout_reads_the_messages_that_were_written(roles: list[str], num_given: int, words: str) -> None:
    messages = [{"role": role, "content": f"{words}{turn}"} for turn, role in enumerate(roles)]
    turns = [{"from": SPEAKERS[each["role"]], "value": each["content"]} for each in messages]
    said = [each for each in messages if each["role"] == "assistant"]
    for layout, row in (("messages", {"messages": messages}), ("sharegpt", {"conversations": json.dumps(turns)})):
        assert lines_of(layout, row, "") == (messages, said)
    common, answers = messages[:num_given], {"chosen": [*messages, *GOOD], "rejected": [*messages[:num_given], *BAD]}
    for side in ANSWERS:
        given, learned = lines_of("preference", answers, side)
        assert given == answers[side]
        assert learned == [each for each in answers[side][len(common) :] if each["role"] == "assistant"]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_last_turn_alone_may_be_learned(template: str) -> None:
    whole = run({"messages": [TALK]}, chat_template=template)
    last = run({"messages": [TALK]}, chat_template=template, loss_on="last")
    assert text(last) == text(whole)
    assert learned(last) == learned(whole).removeprefix(learned(run({"messages": [TALK[:3]]}, chat_template=template)))
    assert learned(last).startswith("Bye")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("as_lists", [True, False])
def test_nothing_of_a_prompt_is_learned(template: str, as_lists: bool) -> None:
    prompt = TALK[:-1] if as_lists else "And?"
    completion = TALK[-1:] if as_lists else "Bye"
    output = run({"prompt": [prompt], "completion": [completion]}, chat_template=template, chat_format="prompt")
    expected = TALK if as_lists else [{"role": "user", "content": "And?"}, TALK[-1]]
    assert text(output) == text(run({"messages": [expected]}, chat_template=template))
    assert learned(output).strip() == "Bye<|im_end|>"


def test_a_prompt_without_a_template_is_text_that_is_continued() -> None:
    columns = {"prompt": ["Q: 1 + 1 =", "", "x"], "completion": [" 2, naïve 👍", "only", ""]}
    output = run(columns, chat_format="prompt", append_eos="<|eos|>")
    assert [text(output, row=row) for row in range(3)] == [
        "Q: 1 + 1 = 2, naïve 👍<|eos|>",
        "only<|eos|>",
        "x<|eos|>",
    ]
    assert learned(output) == " 2, naïve 👍<|eos|>"
    assert learned(output, row=1) == "only<|eos|>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_preference_is_two_conversations_and_only_the_answers_are_learned(template: str) -> None:
    prompt = TALK[:4]
    implicit = {"chosen": [[*prompt, *GOOD]], "rejected": [[*prompt, *BAD]]}
    explicit = {"prompt": [prompt], "chosen": [GOOD], "rejected": [BAD]}
    one = run(implicit, chat_template=template, chat_format="preference")
    other = run(explicit, chat_template=template, chat_format="preference", column="prompt")
    assert list(one.columns) == ["chosen", "chosen_loss_mask", "rejected", "rejected_loss_mask"]
    for name, column in one.columns.items():
        assert np.array_equal(column.values, other.columns[name].values)
    assert learned(one, "chosen").strip() == "Yes!<|im_end|>"
    assert learned(one, "rejected").strip() == "No.<|im_end|>"
    assert text(one, "chosen") == text(run({"messages": [[*prompt, *GOOD]]}, chat_template=template))


def test_a_bad_side_of_a_pair_makes_the_row_bad() -> None:
    columns = {"prompt": ["a", "b", "c"], "chosen": ["x", None, "y"], "rejected": ["z", "z", 5]}
    output = run(columns, chat_format="preference", column="prompt")
    assert reasons(output) == [(1, "null"), (2, "wrong_type")]
    assert [text(output, side) for side in ANSWERS] == ["ax", "az"]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"conversations": [[{"from": "human", "value": "a<|im_end|>b"}, {"from": "gpt", "value": "c"}]]}, SHARED),
        ({"prompt": ["a<|im_end|>b"], "completion": ["c<|im_end|>d"]}, PROMPT),
        ({"prompt": ["a<|im_end|>b"], "completion": ["c<|im_end|>d"]}, {**PROMPT, "chat_template": PLAIN}),
        ({"prompt": ["a<|im_"], "completion": ["end|>d"]}, PROMPT),
        (
            {"prompt": ["a<|im_end|>"], "chosen": ["c<|im_end|>d"], "rejected": ["<|im_end|>"]},
            {**PAIR, "chat_template": None, "column": "prompt"},
        ),
    ],
)
def test_text_in_no_layout_acts_as_a_control_token(columns: dict[str, Any], options: dict[str, Any]) -> None:
    control = hf_tokenizer().token_to_id("<|im_end|>")
    output = run(columns, **options)
    num_turns = 2 if options.get("chat_template") else 0
    for name in {"tokens", *ANSWERS} & output.columns.keys():
        assert np.asarray(output.columns[name][0]).tolist().count(control) == num_turns
    with pytest.raises(AssertionError):
        assert run(columns, special_tokens="refuse", **options).num_samples


@pytest.mark.parametrize(
    ("columns", "options", "reason", "message"),
    [
        (
            {"conversations": [[{"from": "narrator", "value": "x"}]]},
            SHARED,
            "wrong_type",
            "a turn from 'narrator'; the speakers are",
        ),
        ({"conversations": [[{"from": "gpt"}]]}, SHARED, "empty", "a turn without a value"),
        ({"messages": [SHAREGPT]}, {"chat_template": PLAIN}, "wrong_type", "chat_format='sharegpt'"),
        ({"prompt": [TALK], "completion": ["x"]}, PROMPT, "wrong_type", "chat_template=True"),
        ({"chosen": ["x"], "rejected": ["y"]}, PAIR, "wrong_type", "column='prompt'"),
        (
            {"prompt": ["Hi"], "chosen": [TALK], "rejected": [TALK]},
            {**PAIR, "column": "prompt"},
            "wrong_type",
            "includes the prompt",
        ),
    ],
)
def test_rows_in_another_layout_are_bad_and_say_what_to_do(
    columns: dict[str, Any], options: dict[str, Any], reason: str, message: str
) -> None:
    output = run(columns, **options)
    assert [error.reason for error in output.errors] == [reason]
    assert message in output.errors[0].message


@pytest.mark.parametrize("role", ["gpt", "model"])
def test_another_name_for_the_assistant_is_named_because_nothing_is_learned_from_it(role: str) -> None:
    talks = [[{**each, "role": each["role"].replace("assistant", role)} for each in TALK], TALK]
    records = make_records({"messages": talks})
    ready = Tokenize(hf_tokenizer(), chat_template=PLAIN).before_run([records])
    assert f"Nothing is learned from messages of the role '{role}': only 'assistant' counts" in ready.notes[-1]
    assert ready.open()(records).noticed == {
        "conversations_without_a_token_to_learn": 1,
        f"conversations_with_the_role_{role}_in_place_of_assistant": 1,
    }
    for transform, rows in (
        (Tokenize(hf_tokenizer(), chat_template=PLAIN), [TALK]),
        (Tokenize(hf_tokenizer(), chat_template=PLAIN, loss_mask=False), talks),
        (Tokenize(hf_tokenizer(), chat_template=MARKED.replace("'assistant'", repr(role))), talks[:1]),
    ):
        records = make_records({"messages": rows})
        ready = transform.before_run([records])
        assert not any("Nothing is learned" in note for note in ready.notes)
        assert not ready.open()(records).noticed


def test_a_column_may_come_after_the_first_rows_but_not_never() -> None:
    def batches(found_at: int) -> Iterator[Records]:
        absent = make_records({"text": pa.nulls(1)})
        for number in range(100):
            assert number <= 20, "read on although there is no such column"
            found = make_records({"text": pa.array(["a"], pa.large_string())})
            yield found if number == found_at else dataclasses.replace(absent, known=("body", "messages"))

    assert Tokenize("bytes").before_run(itertools.islice(batches(15), 17)).columns()
    with pytest.raises(SchemaError, match=r"There is no field 'text'\. .* The rows hold 'messages': that is"):
        Tokenize("bytes").before_run(batches(16))


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        ({"conversations": SHAREGPT}, ["--chat-format", "messages"], "--chat-format sharegpt"),
        ({"messages": TALK}, ["--chat-format", "sharegpt"], "--chat-format messages"),
        ({"prompt": "a", "completion": "b"}, ["--chat-format", "preference"], "--chat-format prompt"),
        ({"chosen": TALK, "rejected": TALK}, ["--chat-format", "messages"], "--chat-format preference"),
        ({"messages": TALK}, ["--chat-format", "messages", "--column", "mesages"], "Did you mean 'messages'?"),
        ({"messages": TALK}, ["--template-date", "today", "--chat-format", "messages"], "such as '2026-07-01'"),
        ({"messages": TALK, "tools": []}, ["--chat-format", "messages", "--tools-column", "tols"], "mean 'tools'?"),
    ],
)
def test_the_command_says_which_layout_rows_are_in(
    row: dict[str, Any],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    inline: None,
) -> None:
    folder = write_hf_folder(tmp_path / "model", chat_template=PLAIN)
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    options = ["--tokenizer", str(folder), "--workers", "1", *arguments]
    assert main(["prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "data"), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_format": "messages", "tools_column": "tols"}, "mean 'tools'?"),
        ({"chat_format": "sharegpt"}, "chat_format='messages'"),
        ({"chat_format": "messages", "column": "data.mesages"}, "mean 'data.messages'?"),
        (
            {"column": "txt"},
            "The fields are 'messages', 'tools', 'data', 'data.messages', 'text'. Did you mean 'text'?",
        ),
    ],
)
def test_python_rows_say_what_they_hold_as_files_do(
    options: dict[str, Any], message: str, tmp_path: Path, inline: None
) -> None:
    folder = write_hf_folder(tmp_path / "model", chat_template=PLAIN)
    row = {"messages": TALK, "tools": [], "data": {"messages": TALK}, "text": "x"}
    with pytest.raises((ValueError, SchemaError), match=re.escape(message)):
        penstock.prepare([row], tmp_path / "data", transform=Tokenize(folder, **options))


def test_a_template_that_marks_too_little_cannot_tell_turns_apart() -> None:
    once = MARKED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last")
    output = run({"messages": [TALK]}, chat_template=once, loss_on="last")
    assert "marks 1 spans for 2 turns" in output.errors[0].message


def test_the_identity_is_that_of_older_versions_unless_something_new_is_asked_for() -> None:
    def chat(**options: Any) -> dict[str, Any]:
        found: dict[str, Any] = Tokenize(hf_tokenizer(), chat_template=PLAIN, **options).identity["chat"]
        return found

    old = chat()
    assert set(old) == {"template", "values", "date", "loss_mask", "tools_column"}
    assert chat(chat_format="messages") == old
    assert chat(chat_format="sharegpt") == {**old, "format": "sharegpt"}
    assert chat(loss_on="last") == {**old, "loss_on": "last"}


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="chat_format='alpaca'; the choices are"):
        Tokenize(hf_tokenizer(), chat_format="alpaca")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss_on='first'; the choices are"):
        Tokenize(hf_tokenizer(), loss_on="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no chat template;"):
        Tokenize(hf_tokenizer(), chat_format="sharegpt")


def test_the_command_prepares_fine_tuning_data_with_the_tokenizers_own_template(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model", chat_template="{{ strftime_now('%Y') }}{{ mood }}" + PLAIN)
    rows = [{"data": {"talk": SHAREGPT}, "tools": None}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "data"), "--tokenizer", str(folder)]
    chat = ["--chat-format", "sharegpt", "--column", "data.talk", "--tools-column", "tools", "--loss-on", "last"]
    values = ["--template-date", "2026-01-02", "--template-values", '{"mood": "fine"}']
    assert main([*arguments, *chat, *values, "--workers", "1"]) == 0
    ds = penstock.open(tmp_path / "data")
    shown = hf_tokenizer().decode(ds[0]["tokens"].tolist(), skip_special_tokens=False)
    assert shown.startswith("2026fine<|im_start|>")
    assert len(ds) == 3
    assert ds.attributes["transform"]["column"] == "data.talk"
    assert main([*arguments, "--loss-on", "last"]) == 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "rows"])
def test_a_column_may_be_a_field_of_another(tmp_path: Path, kind: str, inline: None) -> None:
    rows: list[dict[str, Any]] = [{"a": {"b": {"c": f"text {row}"}, "x": row}, "y": 1.5} for row in range(50)]
    source: Any = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    elif kind == "arrow":
        with pa.OSFile(str(source), "wb") as file, pa.ipc.new_file(file, pa.Table.from_pylist(rows).schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows))
    else:
        source = rows
    penstock.prepare(source, tmp_path / "out", transform=Tokenize("bytes", column="a.b.c"), workers=1)
    found = [bytes(sample["tokens"].astype("uint8")).decode() for sample in penstock.open(tmp_path / "out")]
    assert found == [f"text {row}" for row in range(50)]


def test_inspect_does_not_claim_a_template_where_texts_were_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, pair = [{"prompt": "a", "chosen": "b", "rejected": "c"}], {"chat_format": "preference", "column": "prompt"}
    for name, template in (("plain", None), ("rendered", PLAIN)):
        transform = penstock.Tokenize(hf_tokenizer(), chat_template=template, **pair)
        penstock.prepare(rows, tmp_path / name, transform=transform)
    assert main(["inspect", str(tmp_path / "plain")]) == 0
    assert "Tokenize, preference joined as plain text, column prompt" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "rendered")]) == 0
    assert "Tokenize, chat template, column prompt" in capsys.readouterr().out
