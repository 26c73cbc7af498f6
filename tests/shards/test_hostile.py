"""Files from strangers: correct checksums, and contents that no writer of ours would give."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import CorruptionError, FormatError
from penstock.shards._manifest import parse_manifest

from .forging import (
    SMALL,
    error_of,
    exercise,
    forge_header,
    forge_manifest,
    forge_tensor,
    header_of,
    manifest_of,
    pad_header,
    put_manifest,
    put_shard,
    sign_manifest,
    write_small,
)
from .strategies import files_of, law, scratch

IOS = ("map", "pread")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "ds")


@pytest.fixture(scope="module")
def reused() -> Iterator[Path]:
    """A folder that many examples write their files into."""
    with scratch() as folder:
        yield write_small(folder / "ds")


@pytest.fixture(scope="module")
def originals(reused: Path) -> dict[str, bytes]:
    return files_of(reused)


def restore(path: Path, originals: dict[str, bytes]) -> None:
    for name, raw in originals.items():
        (path / name).write_bytes(raw)


def test_forging_nothing_gives_the_dataset(small: Path) -> None:
    before = penstock.open(small)[:]
    forge_manifest(small, lambda fields: None)
    forge_header(small, lambda header: None)
    values = np.frombuffer(b"".join(sample["label"].tobytes() for sample in SMALL.samples), np.int64)
    count = manifest_of(small)["shards"][0]["samples"]
    forge_tensor(small, "label", values[:count])
    assert penstock.verify(small).is_sound
    assert penstock.open(small)[:]["label"].tolist() == before["label"].tolist()


def set_shard(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["shards"][0].__setitem__(key, value)


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.__setitem__(key, value)


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.pop(key)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


NAME = "shard-000000-0123456789abcdef.safetensors"
BAD_NAMES = [
    "../shard-000000-0123456789abcdef.safetensors",
    "/etc/passwd",
    "",
    ".",
    "..",
    "manifest.json",
    f"sub/{NAME}",
    f"{NAME}\0",
    f"{NAME}\n",
    f"\0{NAME}",
    NAME.upper(),
    NAME.replace("000000", "٠٠٠٠٠٠"),  # Arabic digits: \d would let them pass
    NAME.replace("/", "\\"),
    "..\\" + NAME,
    "x" * 100_000,
    5,
    None,
    True,
    [NAME],
    {"a": 1},
    nested(900),
]


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name != NAME], ids=lambda name: repr(name)[:20])
def test_a_shard_name_that_is_not_one_is_refused(name: Any, small: Path) -> None:
    forge_manifest(small, set_shard("name", name))
    with pytest.raises(FormatError, match=r"manifest\.json: .* is not the name of a shard") as caught:
        penstock.open(small)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("key", ["samples", "bytes", "header_bytes"])
@pytest.mark.parametrize("count", [-1, True, 2.0, 1e300, "2", None, [2], 2**62, 2**63, 2**64, 10**4000, float("nan")])
def test_a_count_that_is_not_one_is_refused(key: str, count: Any, small: Path) -> None:
    forge_manifest(small, set_shard(key, count))
    with pytest.raises(FormatError, match=r"manifest\.json: the entry of shard-.* is not a count") as caught:
        penstock.open(small)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("count", [-1, True, 2.0, None, 2**62])
def test_a_count_of_values_that_is_not_one_is_refused(count: Any, small: Path) -> None:
    forge_manifest(small, lambda fields: fields["shards"][0]["values"].__setitem__("tokens", count))
    with pytest.raises(FormatError, match="is not a count"):
        penstock.open(small)


@pytest.mark.parametrize("values", [{}, {"tokens": 1}, {"tokens": 1, "pair": 1, "jpeg": 1, "x": 1}, None, [], 5])
def test_counts_of_other_columns_are_refused(values: Any, small: Path) -> None:
    forge_manifest(small, set_shard("values", values))
    with pytest.raises(FormatError, match=r"counts values of|is incomplete"):
        penstock.open(small)


@pytest.mark.parametrize("key", ["name", "samples", "values", "bytes", "header_bytes", "header_crc32c"])
def test_an_entry_that_lacks_a_field_is_refused(key: str, small: Path) -> None:
    forge_manifest(small, lambda fields: fields["shards"][0].pop(key))
    with pytest.raises(FormatError, match=r"is incomplete|not the name of a shard"):
        penstock.open(small)


@pytest.mark.parametrize("value", ["", "0x123456", "-1234567", "1234567", "123456789", "ABCDEF01", 5, None, "1234_678"])
def test_a_header_checksum_that_is_not_one_is_refused(value: Any, small: Path) -> None:
    forge_manifest(small, set_shard("header_crc32c", value))
    with pytest.raises(FormatError, match="is not a checksum"):
        penstock.open(small)


@pytest.mark.parametrize("size", [0, 1, 8, 9, 4095, 4097, (16 << 20) + 4096, 2**40])
def test_a_header_of_an_impossible_size_is_refused_without_touching_the_shard(size: int, small: Path) -> None:
    forge_manifest(small, set_shard("header_bytes", size))
    with pytest.raises(FormatError, match="16,777,216 is the limit"):
        penstock.open(small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", "other"), "not the manifest of a Penstock dataset"),
        (drop("format"), "not the manifest of a Penstock dataset"),
        (put("version", 2), "format version 2; this Penstock reads version 1. Install a newer Penstock"),
        (put("version", 0), "format version 0"),
        (put("version", "1"), "format version '1'"),
        (put("version", True), "format version True"),
        (put("version", 1.0), r"format version 1\.0"),
        (put("version", nested(900)), "format version"),
        (drop("version"), "format version None"),
        (put("columns", []), "must be an object, a list and an object"),
        (put("shards", {}), "must be an object, a list and an object"),
        (put("attributes", 5), "must be an object, a list and an object"),
        (drop("attributes"), "must be an object, a list and an object"),
        (put("columns", {}), "at least one column"),
        (put("columns", {f"c{n}": "int8" for n in range(2000)}), "2,000 columns requested"),
        (put("columns", {"x": "int65"}), "'int65' is not a dtype"),
        (put("columns", {"x": 5}), "has the type 5"),
        (put("columns", {"x": nested(900)}), "has the type"),
        (put("columns", {"x": "int8[" + "9" * 100_000 + "]"}), "is not a shape"),
        (put("columns", {"x": "int8[" + "1," * 50_000 + "1]"}), "50001 dimensions"),
        (put("columns", {"x": "int8[999999999,999999999,999999999]"}), "the limits are"),
        (put("columns", {"": "int8"}), "cannot name a column"),
        (put("columns", {"a.b": "int8"}), "cannot name a column"),
        (put("columns", {"__metadata__": "int8"}), "cannot name a column"),
        (put("columns", {"x" * 1_000_000: "int8"}), "cannot name a column"),
        (put("samples", 5), "'samples' is 5, but the shards hold 12"),
        (put("samples", -1), "'samples' is -1"),
        (put("samples", 12.0), r"'samples' is 12\.0"),
        (put("samples", True), "'samples' is True"),
        (put("samples", nested(900)), "'samples' is"),
        (drop("samples"), "'samples' is None"),
        (put("shards", [5]), "None is not the name of a shard"),
        (put("shards", [None]), "None is not the name of a shard"),
        (lambda fields: fields["shards"].append(fields["shards"][0]), "a shard is named twice"),
        (lambda fields: fields["shards"].pop(), "'samples' is 12, but the shards hold"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_by_name(change: Any, message: str, small: Path) -> None:
    forge_manifest(small, change)
    with pytest.raises(FormatError, match=message) as caught:
        penstock.open(small)
    assert str(small / "manifest.json") in str(caught.value)
    assert len(str(caught.value)) < 600
    assert penstock.verify(small).faults == (str(caught.value),)


@pytest.mark.parametrize("count", [2**48, 2**48 - 1])
def test_counts_whose_sum_is_huge_are_refused(count: int, small: Path) -> None:
    def claim(fields: dict[str, Any]) -> None:
        for shard in fields["shards"]:
            shard["samples"] = count
        fields["samples"] = count * len(fields["shards"])

    forge_manifest(small, claim)
    with pytest.raises(FormatError, match="is the limit"):
        penstock.open(small)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[",
        b"\xff\xfe\x00",
        b"{" * 100_000,
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"format": "penstock", "version": ' + b"9" * 1_000_000,
        b'{"format": "penstock", "version": 1e999999999',
        b'{"format": "penstock", "version": -Infinity',
        b'{"format": "\xed\xa0\x80"',
        b'{"format": "penstock", "attributes": ' + b"[" * 5000 + b"]" * 5000,
        b" " * 1_000_000,
    ],
    ids=range(13),
)
def test_json_bombs_are_format_errors(text: bytes, small: Path) -> None:
    (small / "manifest.json").write_bytes(sign_manifest(text))
    with pytest.raises(FormatError, match=r"manifest\.json"):
        penstock.open(small)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1e400", "Out of range float values"),
        ("NaN", "Out of range float values"),
        ("[{}, [-Infinity]]", "Out of range float values"),
        (r'"\ud800"', "surrogates not allowed"),
        ("[" * 200 + "]" * 200, "more than 100 nested levels of lists and objects"),
        ('{"a":' * 200 + "0" + "}" * 200, "more than 100 nested levels of lists and objects"),
    ],
)
def test_attributes_that_could_not_be_passed_on_are_refused(value: str, message: str, small: Path) -> None:
    text = json.dumps(manifest_of(small) | {"attributes": {"a": "here"}}).replace('"here"', value)
    (small / "manifest.json").write_bytes(sign_manifest(text.encode()[:-1]))
    with pytest.raises(FormatError, match=rf"manifest\.json: the attributes are not valid JSON: .*{message}"):
        penstock.open(small)


def test_attributes_of_99_levels_are_kept_when_samples_are_appended(small: Path) -> None:
    nested = json.loads("[" * 99 + "]" * 99)
    forge_manifest(small, lambda fields: fields["attributes"].update(a=nested))
    with penstock.DatasetWriter(small, SMALL.columns, mode="append"):
        pass
    assert penstock.open(small).storage.attributes == {"a": nested}


def test_a_manifest_of_256_megabytes_is_not_parsed() -> None:
    # Zeros that were never touched take no memory.
    with pytest.raises(FormatError, match="x: longer than 268,435,456 bytes"):
        parse_manifest(bytes((256 << 20) + 1), "x")


def change_tensor(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_tensor("label", dtype="U64"), "tensor 'label' should be .*I64.* but the header says"),
        (change_tensor("label", dtype="F4"), "tensor 'label'"),
        (change_tensor("label", dtype=5), "tensor 'label'"),
        (change_tensor("label", dtype=nested(900)), "tensor 'label'"),
        (change_tensor("label", shape=[1]), "tensor 'label'"),
        (change_tensor("label", shape=[2**62]), "tensor 'label'"),
        (change_tensor("label", shape=[-1]), "tensor 'label'"),
        (change_tensor("label", data_offsets=[0, 32]), "tensor 'label'"),  # over another tensor
        (change_tensor("label", data_offsets=[2**40, 2**40 + 32]), "tensor 'label'"),
        (change_tensor("label", data_offsets=[-8, 24]), "tensor 'label'"),
        (change_tensor("label", data_offsets=[32, 0]), "tensor 'label'"),
        (change_tensor("label", extra=1), "tensor 'label'"),
        (change_tensor("__crc32c__", shape=[0]), "tensor '__crc32c__'"),
        (drop("label"), "lists 12 tensors; there should be 13"),
        (put("other", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "lists 14 tensors"),
        (put("label", None), "tensor 'label'"),
        (put("label", nested(900)), "tensor 'label'"),
        (drop("__metadata__"), "no checksum of the table"),
        (put("__metadata__", {}), "no checksum of the table"),
        (put("__metadata__", {"checksums": 5}), "no checksum of the table"),
        (put("__metadata__", {"checksums": "zz"}), "no checksum of the table"),
        (put("__metadata__", {"checksums": "00000000"}), "describes columns other"),
        (lambda header: header["__metadata__"].update(columns="{}"), "describes columns other"),
        (lambda header: header["__metadata__"].update(format="pt"), "describes columns other"),
        (
            lambda header: header.update(
                {f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(10_000)}
            ),
            "lists 10,013 tensors; there should be 13",
        ),
    ],
)
@pytest.mark.parametrize("io", IOS)
def test_a_header_that_is_not_the_one_computed_is_refused(io: Any, change: Any, message: str, small: Path) -> None:
    forge_header(small, change)
    with pytest.raises(FormatError, match=message) as caught:
        penstock.open(small, io=io)[0]
    name = manifest_of(small)["shards"][0]["name"]
    assert str(small / name) in str(caught.value)
    assert len(str(caught.value)) < 900
    assert penstock.verify(small).faults == (str(caught.value),)


@pytest.mark.parametrize("length", [0, 1, 4089, 2**24, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("io", IOS)
def test_a_header_length_that_is_not_the_manifests_is_refused(io: Any, length: int, small: Path) -> None:
    name = manifest_of(small)["shards"][0]["name"]
    header, data = header_of(small / name)
    put_shard(small, 0, length.to_bytes(8, "little") + pad_header(header)[8:], data)
    with pytest.raises(FormatError, match=f"{name}: the header claims"):
        penstock.open(small, io=io)[0]


@pytest.mark.parametrize("size", [4096, 1 << 20, 16 << 20])
@pytest.mark.parametrize("io", IOS)
def test_a_header_that_reaches_beyond_the_file_is_refused(io: Any, size: int, small: Path) -> None:
    name = manifest_of(small)["shards"][0]["name"]
    (small / name).write_bytes(b"\0" * 100)
    forge_manifest(small, set_shard("header_bytes", size))
    with pytest.raises(FormatError, match=f"{name}: the file has 100 bytes"):
        penstock.open(small, io=io)[0]


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"5", b"null", b"[" * 1_000_000, b"{" * 4000, b"\xff" * 4088, b'"' + b"x" * 20_000_000 + b'"'],
)
def test_a_header_that_is_no_object_is_refused(header: bytes, small: Path) -> None:
    name = manifest_of(small)["shards"][0]["name"]
    _, data = header_of(small / name)
    put_shard(small, 0, pad_header(header), data)
    with pytest.raises(FormatError, match=r"header is not JSON|not an object|16,777,216 is the limit"):
        penstock.open(small)[0]


def first_counts(path: Path) -> tuple[int, int]:
    entry = manifest_of(path)["shards"][0]
    return entry["samples"], entry["values"]["tokens"]


def bad_offsets(num_samples: int, num_values: int) -> dict[str, list[int]]:
    """Offsets of `num_samples` samples that no sound shard has."""
    rising = np.linspace(0, num_values, num_samples + 1, dtype=np.int64).tolist()
    assert num_samples >= 3
    third = 2**64 // 3
    around = [0, third, third * 2 - 2**64, 0]  # each difference, wrapped to 64 bits, is positive
    return {
        "falling": [rising[0], rising[2], rising[1], *rising[3:]],
        "negative": [-1, *rising[1:]],
        "beyond": [*rising[:-1], num_values + 1],
        "far beyond": [*rising[:-1], 2**62],
        "far beyond inside": [0, 2**62, *rising[2:]],
        "lowest": [-(2**63)] * (num_samples + 1),
        "highest": [2**63 - 1] * (num_samples + 1),
        "around": (around + rising)[: num_samples + 1] if num_samples > 3 else around,
    }


@pytest.mark.parametrize("kind", bad_offsets(4, 10))
@pytest.mark.parametrize("check", ["window", "never"])
@pytest.mark.parametrize("io", IOS)
def test_offsets_that_fall_or_leave_the_values_are_never_followed(io: Any, check: Any, kind: str, small: Path) -> None:
    num_samples, num_values = first_counts(small)
    forge_tensor(small, "tokens.offsets", np.array(bad_offsets(num_samples, num_values)[kind], np.int64))
    message = "offsets of column 'tokens' decrease or exceed its"
    (fault,) = penstock.verify(small).faults
    assert message in fault
    ds = penstock.open(small, io=io, check=check).select_columns(["tokens"])
    indices = list(range(num_samples))
    failed = [index for index in indices if not reads(lambda index=index: ds[index], message)]
    gathered = [index for index in indices if not reads(lambda index=index: ds.read([index]), message)]
    assert failed
    assert failed == gathered
    for read in (lambda: ds.read(indices), lambda: ds[:num_samples], lambda: ds.lengths("tokens")):
        assert not reads(read, message)
    assert ds[num_samples]["tokens"].tolist() == SMALL.samples[num_samples]["tokens"].tolist()


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("check", ["window", "never"])
@pytest.mark.parametrize("change", [lambda sizes: sizes + 1, lambda sizes: sizes[::-1] * 2**62, lambda sizes: -sizes])
def test_byte_strings_that_are_not_as_long_as_their_sizes_say_are_never_read(
    change: Any, io: Any, check: Any, small: Path
) -> None:
    """Sizes that wrap around 64 bits, too; other columns stay readable."""
    num_samples, _ = first_counts(small)
    sizes = np.array([len(each) for sample in SMALL.samples[:num_samples] for each in sample["pictures"]], np.int64)
    forge_tensor(small, "pictures.sizes.values", change(sizes))
    message = "column 'pictures': the sizes of byte strings do not add up to their bytes"
    (fault,) = penstock.verify(small).faults
    assert message in fault
    ds = penstock.open(small, io=io, check=check)
    assert not reads(lambda: ds[:num_samples], message)
    for index in range(num_samples):
        found = error_of(lambda index=index: ds[index])
        assert found is None or message in found
    assert ds[num_samples]["pictures"] == SMALL.samples[num_samples]["pictures"]
    assert ds.select_columns(["jpeg"])[0]["jpeg"] == SMALL.samples[0]["jpeg"]


def reads(read: Callable[[], Any], message: str) -> bool:
    """Whether it gives something; the only error it may raise has this message."""
    found = error_of(read)
    assert found is None or message in found
    return found is None


HUGE = """
    import resource, sys, penstock
    from penstock.errors import FormatError
    penstock.open(sys.argv[1]).read([0])  # compilers and threads take their address space first
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
    for path in sys.argv[2:]:
        for io in ("map", "pread"):
            try:
                ds = penstock.open(path, io=io)
                print(len(ds))
                for read in (lambda: ds[0], lambda: ds[-1], lambda: ds.read([0, -1]), lambda: ds.lengths("tokens")):
                    try:
                        read()
                    except FormatError as error:
                        assert path in str(error)
                    else:
                        sys.exit("read what is not there")
            except FormatError as error:
                assert path in str(error)
    print("done")
"""


def test_huge_claims_allocate_nothing(tmp_path: Path) -> None:
    sound = write_small(tmp_path / "sound")
    paths = []
    for place, (key, count) in enumerate(
        [("samples", 2**47), ("samples", 2**33), ("tokens", 2**47), ("tokens", 2**36)]
    ):
        path = write_small(tmp_path / str(place))

        def claim(fields: dict[str, Any], key: str = key, count: int = count) -> None:
            for shard in fields["shards"]:
                (shard if key == "samples" else shard["values"])[key] = count // len(fields["shards"])
                shard["bytes"] = 2**47
            fields["samples"] = sum(shard["samples"] for shard in fields["shards"])

        forge_manifest(path, claim)
        paths.append(str(path))
    command = [sys.executable, "-c", textwrap.dedent(HUGE), str(sound), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


@pytest.mark.parametrize("spec", ["float32[0]", "float32[*,0]", "float32[*,0,999999999]", "int64[0,999999999]"])
def test_huge_numbers_of_nothing_are_nothing_or_refused(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "ds"
    with penstock.DatasetWriter(path, {"x": spec}) as writer:
        shape = tuple(int(size) for size in spec[spec.index("[") + 1 : -1].replace("*", "1").split(","))
        writer.write({"x": np.empty(shape, spec.partition("[")[0])})
    count = 2**48
    forge_manifest(path, set_shard("values", {"x": count} if "*" in spec else {}))
    if "*" not in spec:
        forge_manifest(path, set_shard("samples", count))
        forge_manifest(path, put("samples", count))

    def claim(header: dict[str, Any]) -> None:
        header["x.values" if "*" in spec else "x"]["shape"][0] = count

    forge_header(path, claim)
    if "*" in spec:
        forge_tensor(path, "x.offsets", np.array([0, count], np.int64))
    for io in IOS:
        exercise(path, io=io)
    penstock.verify(path)


@law
@given(raw=st.binary(max_size=300) | st.binary(max_size=100).map(sign_manifest))
def test_any_bytes_as_a_manifest_are_a_format_error(reused: Path, originals: dict[str, bytes], raw: bytes) -> None:
    (reused / "manifest.json").write_bytes(raw)
    try:
        with pytest.raises(FormatError, match=r"manifest\.json"):
            penstock.open(reused)
    finally:
        restore(reused, originals)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from([2**31, 2**48, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "../x", "int64", "bytes", "uint16[*]", "float32[0]", "int8[*,0]", "__x", "00000000"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a tree of JSON."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutate(data: st.DataObject, tree: Any) -> Any:
    """Replace, remove, rename or repeat a few parts of a tree."""
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(tree))
        if not found:
            return tree
        *parents, key = data.draw(st.sampled_from(found))
        parent = tree
        for step in parents:
            parent = parent[step]
        action = data.draw(st.sampled_from(["replace", "replace", "nudge", "remove", "rename", "repeat"]))
        if action == "remove":
            del parent[key]
        elif action == "nudge" and type(parent[key]) is int:
            parent[key] += data.draw(st.integers(-3, 3))
        elif action == "rename" and isinstance(parent, dict):
            parent[data.draw(st.text(max_size=6))] = parent.pop(key)
        elif action == "repeat" and isinstance(parent, list):
            parent.append(parent[key])
        else:
            parent[key] = data.draw(json_values)
    return tree


@settings(law, max_examples=100)
@given(data=st.data(), io=st.sampled_from(IOS))
def test_any_change_to_a_manifest_gives_nothing_but_our_errors(
    reused: Path, originals: dict[str, bytes], data: st.DataObject, io: Any
) -> None:
    try:
        put_manifest(reused, mutate(data, manifest_of(reused)))
        exercise(reused, io=io, check=data.draw(st.sampled_from(["window", "open", "never"])))
        penstock.verify(reused)
    finally:
        restore(reused, originals)


@settings(law, max_examples=100)
@given(data=st.data(), io=st.sampled_from(IOS))
def test_any_change_to_a_header_gives_nothing_but_our_errors(
    reused: Path, originals: dict[str, bytes], data: st.DataObject, io: Any
) -> None:
    name = manifest_of(reused)["shards"][0]["name"]
    header, content = header_of(reused / name)
    try:
        text = data.draw(st.just(None) | st.binary(max_size=200))
        put_shard(reused, 0, pad_header(mutate(data, header) if text is None else text), content)
        exercise(reused, io=io, check=data.draw(st.sampled_from(["window", "never"])))
        penstock.verify(reused)
    finally:
        restore(reused, originals)


@settings(law, max_examples=60)
@given(
    offsets=st.lists(
        st.integers(-3, 60) | st.integers(-(2**63), 2**63 - 1), min_size=len(SMALL.samples), max_size=len(SMALL.samples)
    ),
    io=st.sampled_from(IOS),
    check=st.sampled_from(["window", "never"]),
)
def test_any_offsets_give_sound_samples_or_a_format_error(
    reused: Path, originals: dict[str, bytes], offsets: list[int], io: Any, check: Any
) -> None:
    try:
        num_samples, num_values = first_counts(reused)
        edges = np.array(offsets[: num_samples + 1], np.int64)
        forge_tensor(reused, "tokens.offsets", edges)
        ds = penstock.open(reused, io=io, check=check).select_columns(["tokens"])
        values = np.concatenate([sample["tokens"] for sample in SMALL.samples[:num_samples]])
        for index, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            for read in (lambda index=index: ds[index], lambda index=index: {"tokens": ds.read([index])["tokens"][0]}):
                try:
                    found = read()["tokens"]
                except FormatError:
                    continue
                assert 0 <= begin <= end <= num_values
                assert found.tolist() == values[begin:end].tolist()
    finally:
        restore(reused, originals)


def test_many_random_bytes_over_files_give_nothing_but_our_errors(reused: Path, originals: dict[str, bytes]) -> None:
    rng = random.Random(5)
    for number in range(150):
        name = rng.choice(list(originals))
        raw = bytearray(originals[name])
        begin = rng.randrange(len(raw))
        raw[begin : begin + rng.randrange(1, 200)] = rng.randbytes(rng.randrange(200))
        try:
            (reused / name).write_bytes(raw)
            exercise(reused, io=IOS[number % 2])
            assert not penstock.verify(reused).is_sound or bytes(raw) == originals[name]
        finally:
            restore(reused, originals)


def test_an_edited_manifest_is_said_to_be_edited(small: Path) -> None:
    path = small / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"samples": 12', b'"samples": 13'))
    with pytest.raises(CorruptionError, match=r"manifest\.json: .* damaged, truncated or was edited. Restore it"):
        penstock.open(small)
