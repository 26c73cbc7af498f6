"""Plans as TOML: what goes out comes back, and nothing runs that was not allowed."""

from __future__ import annotations

import os
import pickle
import string
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.cli import main
from penstock.errors import DatasetChanged, FormatError, PenstockError
from penstock.plan import Plan

from . import functions
from .examples import assert_same, make_documents, tokens_dataset, write_tokens

ALLOWED = [functions.__name__.partition(".")[0]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset folder, a second one, and files of other programs."""
    root = tmp_path_factory.mktemp("daten \u00fc\U0001f600\x7f")
    extra = {"x": ("int32", list(range(20)))}
    write_tokens(root / "corpus", make_documents([5, 9, 0, 30] * 5), **extra)
    write_tokens(root / "other", make_documents([7, 2] * 10, first=5000), **extra)
    np.arange(60, dtype=np.uint16).tofile(root / "train.bin")
    np.save(root / "numbers.npy", np.arange(24).reshape(12, 2))
    return root


PLANS: dict[str, Callable[[Path], Plan]] = {
    "no stage": lambda root: penstock.open(root / "corpus").as_plan(),
    "samples": lambda root: penstock.open(root / "corpus").shuffle(-7, "full").batch(4, tail="drop"),
    "cast": lambda root: penstock.open(root / "corpus").select_columns(["x"]).cast(x="float64").shuffle(2**70).batch(3),
    "pread": lambda root: penstock.open(root / "corpus", io="pread", check="never").shuffle(1).batch(3),
    "window": lambda root: penstock.open(root / "corpus").shuffle(1, group=3).window(7).batch(3, tail="short"),
    "pack": lambda root: (
        penstock.open(root / "corpus")
        .shuffle(1)
        .pack(8, long="truncate", max_documents=3, labels="same", positions="continue", pad=-5)
        .batch(2, tail="pad")
    ),
    "map": lambda root: (
        penstock.open(root / "corpus")
        .shuffle(1)
        .window(4)
        .map(functions.first_token, batched=True)
        .map(functions.jitter)
        .map(functions.Scale.double)
        .batch(4)
    ),
    "split": lambda root: (
        penstock.open(root / "corpus")
        .split({"train": 0.7, "rest": 0.3}, seed=5)["train"]
        .split({"a": 0.123456789, "b": 0.876543211}, seed=-6, by="index")["b"]
        .split({"c": 0.9, "d": 0.1}, seed=7, by=["tokens"])["c"]
        .shuffle(1)
        .batch(4)
    ),
    "raw": lambda root: penstock.open(root / "train.bin", dtype="uint16", column="tokens").window(8).batch(2),
    "raw rows": lambda root: penstock.open(root / "train.bin", dtype="uint16", shape=(-1, 6)).shuffle(1).batch(2),
    "npy": lambda root: penstock.open(root / "numbers.npy", column="v").shuffle(1).batch(5),
    "mix": lambda root: (
        penstock.mix(
            {
                "web": (penstock.open(root / "corpus").shuffle(1).pack(8), 1 / 3),
                'a "name" with\n ü.dots': (penstock.open(root / "other").pack(8, long="drop"), 1e-4),
            },
            seed=9,
            epoch="web",
        )
        .map(functions.first_token, batched=True)
        .batch(4)
    ),
    "mix of mixtures": lambda root: penstock.mix(
        {
            "inner": (
                penstock.mix({"x": (penstock.open(root / "corpus").window(4), 2)}, seed=3, rows=11),
                1e20,
            ),
            "o": (penstock.open(root / "other").split({"t": 1.0}, seed=1)["t"].shuffle(4).window(4), 5e20),
        },
        seed=-9,
        rows=100,
    ).batch(4),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_comes_back_from_its_file(root: Path, tmp_path: Path, name: str) -> None:
    plan = PLANS[name](root)
    path = tmp_path / "plan.toml"
    path.write_text(plan.to_toml(), encoding="utf-8")
    loaded = penstock.load_plan(path, allow_code=ALLOWED)
    assert loaded.fingerprint == plan.fingerprint
    assert loaded.order_fingerprint == plan.order_fingerprint
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert repr(loaded) == repr(plan)
    assert loaded.to_toml() == plan.to_toml()
    assert pickle.loads(pickle.dumps(plan)) == plan
    if name != "no stage":
        assert_same(loaded.read(1), plan.read(1))


def test_a_column_of_any_name_can_be_cast(tmp_path: Path) -> None:
    name = 'verb = "self"\u00fc \U0001f600'
    with penstock.DatasetWriter(tmp_path / "d", {name: "int8", "verb": "int8", "self": "int8"}) as writer:
        writer.write({name: 1, "verb": 2, "self": 3})
    plan = penstock.open(tmp_path / "d").cast(**{name: "int64", "verb": "int16", "self": "int32"}).batch(1)
    (tmp_path / "p.toml").write_text(plan.to_toml(), encoding="utf-8")
    assert penstock.load_plan(tmp_path / "p.toml") == plan


def local_function(row: Any) -> Any:
    return row


def closure() -> Callable[..., Any]:
    def inner(row: Any) -> Any:
        return row

    return inner


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda row: row, r"<lambda> cannot be named in a file"),
        (closure(), r"closure.<locals>.inner cannot be named in a file"),
        (partial(local_function), r"functools.partial.* cannot be named in a file"),
        (functions.scale, r"Scale object.* cannot be named in a file"),
        (functions.Scale().__call__, r"Scale.__call__ does not lead back to the function"),
    ],
)
def test_functions_without_a_name_are_refused(root: Path, function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        penstock.open(root / "corpus").map(function).batch(2).to_toml()


def test_functions_of_main_and_shadowed_ones_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = penstock.open(root / "corpus").map(local_function).batch(2)
    assert f"{__name__}:local_function" in plan.to_toml()
    monkeypatch.setattr(local_function, "__module__", "__main__")
    with pytest.raises(ValueError, match="local_function cannot be named in a file"):
        plan.to_toml()
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "local_function", closure())
    with pytest.raises(ValueError, match="does not lead back to the function"):
        plan.to_toml()


def test_arrays_and_lists_of_indices_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="A plan over arrays in RAM has no file"):
        tokens_dataset([3]).pack(8).to_toml()
    for subset in (penstock.open(root / "corpus").take([1]), penstock.open(root / "corpus").filter(np.ones(20, bool))):
        with pytest.raises(ValueError, match=r"take\(\) or filter\(\) holds a list of indices"):
            subset.batch(2).to_toml()
        with pytest.raises(ValueError, match=r"take\(\) or filter\(\)"):
            penstock.mix({"a": (subset, 1)}, seed=1, rows=2).to_toml()


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import leaves a file behind."""
    for name in ("trap", "trapdoor"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            f"import os, pathlib\npathlib.Path({str(tmp_path / 'sprung')!r}).touch()\ndef go(row):\n    return row\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "sprung"
    for name in ("trap", "trapdoor"):
        sys.modules.pop(name, None)


def plan_naming(root: Path, tmp_path: Path, function: str) -> Path:
    text = PLANS["map"](root).to_toml().replace(f"{functions.__name__}:jitter", function)
    text = text.replace(f"{functions.__name__}:first_token", function)
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("allow_code", [(), ["tests"], ["tra"], ["trapdoor"], ["trap.inner"], [""]])
def test_nothing_is_imported_that_is_not_allowed(root: Path, tmp_path: Path, trap: Path, allow_code: Any) -> None:
    path = plan_naming(root, tmp_path, "trap:go")
    with pytest.raises(FormatError, match=r"names the function trap:go, .*allow_code=\['trap'\]"):
        penstock.load_plan(path, allow_code=allow_code)
    assert not trap.exists()
    assert "trap" not in sys.modules


def test_what_is_allowed_is_imported(root: Path, tmp_path: Path, trap: Path) -> None:
    penstock.load_plan(plan_naming(root, tmp_path, "trap:go"), allow_code=["trap", *ALLOWED])
    assert trap.exists()


def test_a_name_cannot_reach_through_an_allowed_package_into_another(root: Path, tmp_path: Path, trap: Path) -> None:
    for name in ("trap:os.system", "trap:pathlib.Path.unlink", f"{functions.__name__}:join"):
        with pytest.raises(FormatError, match=r"is not a function of .*it is from (os|posix|pathlib|posixpath|None)"):
            penstock.load_plan(plan_naming(root, tmp_path, name), allow_code=["trap", *ALLOWED])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{module}:missing", "cannot be found"),
        ("{module}.missing:f", "cannot be found"),
        ("{module}:NOT_A_FUNCTION", "is not a function"),
        ("{module}:", "cannot be found"),
        ("{module}", "cannot be found"),
        (":", "was not allowed"),
        ("", "was not allowed"),
    ],
)
def test_a_function_that_is_not_there_is_an_error_of_the_file(
    root: Path, tmp_path: Path, name: str, message: str
) -> None:
    path = plan_naming(root, tmp_path, name.format(module=functions.__name__))
    with pytest.raises(FormatError, match=message):
        penstock.load_plan(path, allow_code=ALLOWED)


def test_allow_code_as_one_string_is_refused(root: Path, tmp_path: Path) -> None:
    """It would allow every package that is called by one of its letters."""
    with pytest.raises(TypeError, match=r"give a list of packages, as in \['trap'\]"):
        penstock.load_plan(plan_naming(root, tmp_path, "t:go"), allow_code="trap")


def test_a_dataset_that_changed_is_named_with_both_fingerprints(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d", make_documents([3, 4]))
    dataset = penstock.open(tmp_path / "d")
    (tmp_path / "plan.toml").write_text(dataset.shuffle(1).pack(8).batch(2).to_toml())
    with penstock.DatasetWriter(tmp_path / "d", {"tokens": "uint32[*]"}, mode="append") as writer:
        writer.write({"tokens": [1]})
    with pytest.raises(DatasetChanged) as caught:
        penstock.load_plan(tmp_path / "plan.toml")
    assert dataset.fingerprint in str(caught.value)
    assert penstock.open(tmp_path / "d").fingerprint in str(caught.value)
    with penstock.DatasetWriter(tmp_path / "d", {"text": "bytes"}, mode="overwrite") as writer:
        writer.write({"text": b"other columns"})
    with pytest.raises(DatasetChanged, match=penstock.open(tmp_path / "d").fingerprint):
        penstock.load_plan(tmp_path / "plan.toml")


def test_a_foreign_file_that_changed_is_noticed(root: Path, tmp_path: Path) -> None:
    np.arange(60, dtype=np.uint16).tofile(tmp_path / "t.bin")
    plan = penstock.open(tmp_path / "t.bin", dtype="uint16", column="tokens").window(8).batch(2)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    np.arange(1, 61, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(DatasetChanged):
        penstock.load_plan(tmp_path / "plan.toml")


def test_a_dataset_that_is_gone_or_a_plan_that_is_gone_is_not_found(root: Path, tmp_path: Path) -> None:
    text = PLANS["pack"](root).to_toml().replace("corpus", "nowhere")
    (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
    with pytest.raises(FileNotFoundError) as caught:
        penstock.load_plan(tmp_path / "plan.toml")
    assert isinstance(caught.value, PenstockError)
    with pytest.raises(FileNotFoundError):
        penstock.load_plan(tmp_path / "missing.toml")


HOSTILE = [
    "",
    "version = 1",
    "version = 2\n[source]\npath = 'x'",
    "version = 1\nsource = 5",
    "version = 1\nsource = 'mix'",
    "version = 1\nsource = ['mix']",
    "version = 1\n[source]\nmix = 5\nseed = 1\nrows = 2",
    "version = 1\n[source]\nseed = 1\nrows = 2\n[source.mix]",
    "version = 1\n[source]\nseed = 1\nrows = 2\n[source.mix]\na = 5",
    "version = 1\n[source]\nseed = 1\nrows = 2\n[source.mix.a]\nweight = 1",
    "version = 1\n[source]\npath = 5\nfingerprint = ''\ncolumns = []",
    "version = 1\n[source]\npath = '/dev/zero'\nformat = 'raw'\ndtype = 'uint8'\nfingerprint = ''\ncolumns = ['data']",
    "version = 1\n[source]\npath = '/proc/self/mem'\nformat = 'npy'\nfingerprint = ''\ncolumns = ['x']",
    'version = 1\n[source]\npath = "\\u0000"\nfingerprint = ""\ncolumns = []',
    f"version = 1\n[source]\npath = '/{'a' * 5000}'\nfingerprint = ''\ncolumns = []",
    "version = 1\n[source]\npath = '/nowhere'\nfingerprint = ''\ncolumns = []",
    "[[[[",
    "a = " + "[" * 5000,
    "version = 1\n" + "".join(f"[source{'.mix.a.source' * depth}]\nseed = 1\nrows = 1\n" for depth in range(300)),
    "\x00",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_file_that_is_no_plan_only_gives_errors_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
    with pytest.raises(PenstockError):
        penstock.load_plan(tmp_path / "plan.toml")


@pytest.mark.parametrize("verb", ["inspect", "trace", "serve"])
def test_a_pipe_in_the_place_of_a_plan_is_refused_and_not_waited_for(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "plan.toml")
    with pytest.raises(FormatError, match="not a regular file"):
        penstock.load_plan(tmp_path / "plan.toml")
    assert main([verb, str(tmp_path / "plan.toml"), *(["--step", "0", "--batch", "2"] if verb == "trace" else [])]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_bytes_that_are_no_text_only_give_errors_of_ours(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b"version = 1\n\xff\xfe = 3")
    with pytest.raises(FormatError, match="not TOML"):
        penstock.load_plan(tmp_path / "plan.toml")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "plan.toml").write_text(
        f"version = 1\n[source]\npath = '{fifo}'\nformat = 'raw'\ndtype = 'uint8'\nfingerprint = ''\ncolumns = ['data']"
    )
    with pytest.raises(PenstockError):
        penstock.load_plan(tmp_path / "plan.toml")


VALUES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from(["true", "1.5", "nan", "-inf", "''", "'x'", "[]", "[1, 2]", "{}", "1979-05-27", "'\\u0000'"]),
    st.text(string.printable, max_size=5).map(repr),
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["pack", "window", "samples", "cast", "split", "mix of mixtures", "raw rows"]), st.data())
def test_a_damaged_plan_is_loaded_or_refused_but_never_anything_else(
    root: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    lines = PLANS[name](root).to_toml().splitlines()
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, len(lines) - 1))
        action = data.draw(st.sampled_from(["value", "value", "value", "delete", "double", "junk"]))
        if action == "value" and " = " in lines[place]:
            lines[place] = f"{lines[place].partition(' = ')[0]} = {data.draw(VALUES)}"
        elif action == "delete" and len(lines) > 1:
            del lines[place]
        elif action == "double":
            lines.insert(place, lines[place])
        else:
            lines.insert(place, data.draw(st.text(max_size=10)))
    path = tmp_path_factory.getbasetemp() / "damaged.toml"
    path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    try:
        plan = penstock.load_plan(path)
    except PenstockError:
        return
    assert isinstance(plan.fingerprint, str)
    assert isinstance(repr(plan), str)
