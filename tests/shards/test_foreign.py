"""Files of other programs, written here by their published layouts and adopted without a copy."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import penstock
from penstock.errors import DatasetChanged, FormatError, IncompleteDataset, SchemaError, StorageError

from .forging import error_of
from .strategies import law, scratch

MEGATRON_CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def save_npy(path: Path, array: NDArray[Any], version: tuple[int, int] = (1, 0)) -> Path:
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return path


def npy_with_header(path: Path, header: bytes, *, version: bytes = b"\x01\x00", data: bytes = b"") -> Path:
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    path.write_bytes(b"\x93NUMPY" + version + size + header + data)
    return path


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["?", "u1", "<i2", "<u8", "<f2", "<f4", "<c8"])
@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_an_npy_file_gives_its_rows(dtype: str, version: tuple[int, int], tmp_path: Path) -> None:
    array = np.arange(24).reshape(4, 3, 2).astype(dtype)
    ds = penstock.open(save_npy(tmp_path / "x.npy", array, version))
    assert len(ds) == 4
    assert ds.schema.to_json() == {"data": f"{array.dtype.name}[3,2]"}
    assert np.array_equal(ds[2]["data"], array[2])
    assert np.array_equal(ds.read([3, 0, -1, 3])["data"], array[[3, 0, 3, 3]])


def test_an_npy_file_of_numbers_has_a_number_per_sample(tmp_path: Path) -> None:
    ds = penstock.open(save_npy(tmp_path / "x.npy", np.arange(5, dtype=np.int32)), column="label")
    assert [sample["label"] for sample in ds] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0)])
def test_an_npy_file_of_nothing_is_a_dataset(shape: tuple[int, ...], tmp_path: Path) -> None:
    ds = penstock.open(save_npy(tmp_path / "x.npy", np.empty(shape)))
    assert len(ds) == shape[0]
    assert ds[:]["data"].shape == shape


def test_fortran_order_is_refused_unless_it_makes_no_difference(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"x\.npy: stored in Fortran order.*save a C-order copy"):
        penstock.open(save_npy(tmp_path / "x.npy", np.asfortranarray(np.ones((3, 2)))))
    assert len(penstock.open(save_npy(tmp_path / "y.npy", np.asfortranarray(np.ones(3))))) == 3


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3, dtype=">i4"),
        np.array([{}, {}]),
        np.array(["a", "b"]),
        np.array([b"a", b"b"]),
        np.zeros(2, "i4,f4"),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "V2"),
        np.zeros(2, "c16"),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: array.dtype.str,
)
@pytest.mark.filterwarnings("ignore:Custom dtypes are saved as python objects")
def test_an_npy_file_that_cannot_be_mapped_is_refused_by_name(array: NDArray[Any], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"x\.npy: .*(cannot be mapped as a column|No shard can hold)"):
        penstock.open(save_npy(tmp_path / "x.npy", array))


def test_objects_in_an_npy_file_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return pytest.fail, ("unpickled",)

    with pytest.raises(FormatError):
        penstock.open(save_npy(tmp_path / "x.npy", np.array([Trap()])))


def test_a_single_number_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds a single number, not samples"):
        penstock.open(save_npy(tmp_path / "x.npy", np.array(5)))


def test_every_truncation_of_an_npy_file_is_refused(tmp_path: Path) -> None:
    whole = save_npy(tmp_path / "x.npy", np.arange(20)).read_bytes()
    for length in [*range(0, 130, 7), 128, len(whole) - 1]:
        (tmp_path / "x.npy").write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"x\.npy"):
            penstock.open(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match=r"289 bytes, but int64 of shape \[20\] takes 288"):
        penstock.open(tmp_path / "x.npy")


HOSTILE_HEADERS = [
    b"(((((\n",
    b"-" * 50_000 + b"1\n",
    b"'''\n",
    b"{[]: 1}\n",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -2)}\n",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (2**70,)}\n",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}\n",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (4.0,)}\n",
    b"{'descr': '<f4', 'fortran_order': 1, 'shape': (4,)}\n",
    b"{'descr': [], 'fortran_order': False, 'shape': (4,)}\n",
    b"{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (2,)}\n",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (2,)}\n",
    b"{'descr': '|V0', 'fortran_order': False, 'shape': (2,)}\n",
    b"{'descr': '<f4', 'fortran_order': False}\n",
    b"__import__('os').system('true')\n",
    b"\xff\xff\n",
    b"x" * 65_000 + b"\n",
]


@pytest.mark.parametrize("header", HOSTILE_HEADERS, ids=range(len(HOSTILE_HEADERS)))
@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x03\x00"])
def test_a_hostile_npy_header_is_a_format_error(header: bytes, version: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"x\.npy"):
        penstock.open(npy_with_header(tmp_path / "x.npy", header, version=version, data=bytes(16)))


def test_an_npy_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}\n"
    with pytest.raises(FormatError, match=r"unknown version \(4, 0\)|we only support"):
        penstock.open(npy_with_header(tmp_path / "x.npy", header, version=b"\x04\x00", data=bytes(16)))


@law
@given(st.data())
def test_any_bytes_as_an_npy_file_give_nothing_but_our_errors(data: st.DataObject) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6, dtype=np.int16).reshape(3, 2))
    raw = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with scratch() as folder:
        (folder / "x.npy").write_bytes(raw)
        message = error_of(lambda: penstock.open(folder / "x.npy")[:])
        assert message is None or "x.npy" in message


def test_a_raw_file_is_read_as_nanogpt_reads_it(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 50257, 1024 * 9, np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    ds = penstock.open(tmp_path / "train.bin", dtype="uint16", shape=(-1, 1024), column="tokens")
    expected = np.memmap(tmp_path / "train.bin", np.uint16, "r").reshape(-1, 1024)
    out = np.empty((3, 1024), np.int64)
    assert np.array_equal(ds.read([8, 0, 4], out={"tokens": out})["tokens"], expected[[8, 0, 4]])
    single = penstock.open(tmp_path / "train.bin", dtype="uint16")
    assert len(single) == len(tokens)
    assert single[-1]["data"] == tokens[-1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, FormatError, r"train\.bin: a raw file does not describe itself. Give dtype="),
        ({"dtype": "uint16", "shape": (-1, 7)}, FormatError, "20 bytes are not a whole number of rows of 14 bytes"),
        ({"dtype": "int64"}, FormatError, "20 bytes are not a whole number of rows of 8"),
        ({"dtype": "uint16", "shape": (5, 3)}, FormatError, r"20 bytes, but uint16 of shape \[5, 3\] takes 30"),
        ({"dtype": "uint16", "shape": (4, 2)}, FormatError, "takes 16"),
        ({"dtype": "uint16", "shape": (-1, 0)}, FormatError, "not a whole number of rows of 0 bytes"),
        ({"dtype": "uint16", "shape": (-1, 2**40, 2**40)}, FormatError, "not a whole number of rows"),
        ({"dtype": "uint16", "shape": ()}, ValueError, "sizes must not be negative"),
        ({"dtype": "uint16", "shape": (5, -1)}, ValueError, "sizes must not be negative"),
        ({"dtype": "uint16", "shape": (-2,)}, ValueError, "sizes must not be negative"),
        ({"dtype": "u2"}, SchemaError, "'u2' is not a dtype"),
        ({"dtype": "uint16", "column": "a.b"}, SchemaError, "cannot name a column"),
        ({"dtype": "uint16", "io": "pread"}, ValueError, "is adopted as a memory map"),
        ({"dtype": "uint16", "check": "sometimes"}, ValueError, "the choices are 'window', 'open' and 'never'"),
    ],
)
def test_a_raw_file_that_does_not_fit_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(error, match=message):
        penstock.open(tmp_path / "train.bin", **options)


def test_big_endian_numbers_in_a_raw_file_are_refused_and_not_read_the_wrong_way_round(tmp_path: Path) -> None:
    np.arange(6, dtype=">f4").tofile(tmp_path / "x.bin")
    with pytest.raises(SchemaError, match=r"dtype >f4 is big-endian.*array\.astype\('<f4'\)"):
        penstock.open(tmp_path / "x.bin", dtype=np.dtype(">f4"))
    for dtype in (np.dtype(">u1"), np.uint8, np.dtype("<f4"), np.float32, ml_dtypes.bfloat16):
        assert len(penstock.open(tmp_path / "x.bin", dtype=dtype)) == 24 // np.dtype(dtype).itemsize


def test_an_empty_raw_file_has_no_samples(tmp_path: Path) -> None:
    (tmp_path / "train.bin").touch()
    assert len(penstock.open(tmp_path / "train.bin", dtype="uint16", shape=(-1, 8))) == 0


def write_megatron(
    prefix: Path, sequences: list[NDArray[Any]], documents: list[int], *, dtype: str = "uint16", modes: bool = False
) -> Path:
    """`prefix.bin` and `prefix.idx` by the layout of megatron/core/datasets/indexed_dataset.py."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[:-1] * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", MEGATRON_CODES[dtype])
    index += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(documents))
    index += lengths.tobytes() + pointers.astype(np.int64).tobytes() + np.array(documents, np.int64).tobytes()
    index += bytes(len(lengths)) if modes else b""
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.astype(dtype).tobytes() for sequence in sequences))
    Path(f"{prefix}.idx").write_bytes(index)
    return Path(f"{prefix}.idx")


SEQUENCES = [np.arange(3), np.arange(0), np.arange(10, 14), np.arange(20, 21)]


@pytest.mark.parametrize("dtype", MEGATRON_CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_a_megatron_pair_gives_its_documents(dtype: str, modes: bool, tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", SEQUENCES, [0, 1, 3, 3, 4], dtype=dtype, modes=modes)
    for name in ("corpus", "corpus.idx", "corpus.bin"):
        ds = penstock.open(tmp_path / name)
        assert ds.schema.to_json() == {"tokens": f"{dtype}[*]"}
        documents = [[0, 1, 2], [10, 11, 12, 13], [], [20]]
        assert [sample["tokens"].tolist() for sample in ds] == documents
        assert [document.tolist() for document in ds.read([3, 0, -1, 1])["tokens"]] == [
            [20],
            [0, 1, 2],
            [20],
            [*range(10, 14)],
        ]
        assert ds.lengths("tokens").tolist() == [3, 4, 0, 1]


@pytest.mark.parametrize("prefix", ["corpus-v1.0_text_document", "a.bin.idx.b", ".hidden"])
def test_a_megatron_prefix_may_hold_dots(prefix: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / prefix, SEQUENCES, [0, 4])
    assert len(penstock.open(tmp_path / prefix)) == 1
    assert len(penstock.open(tmp_path / prefix, format="megatron")) == 1


def test_a_megatron_pair_of_nothing_is_a_dataset(tmp_path: Path) -> None:
    assert len(penstock.open(write_megatron(tmp_path / "corpus", [], [0]))) == 0


@pytest.mark.parametrize("modes", [False, True])
def test_every_truncation_of_a_megatron_index_is_refused(modes: bool, tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "corpus", SEQUENCES, [0, 1, 4], modes=modes)
    whole = path.read_bytes()
    for length in range(len(whole)):
        if modes and length == len(whole) - len(SEQUENCES):
            continue  # then it is the index without modes
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"corpus\.idx"):
            penstock.open(path)


def test_truncated_megatron_tokens_are_refused(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "corpus", SEQUENCES, [0, 1, 4])
    data = path.with_suffix(".bin")
    for length in (0, 1, 15):
        data.write_bytes(bytes(length))
        with pytest.raises(FormatError, match=rf"corpus\.bin: {length} bytes, but corpus\.idx points to byte 16"):
            penstock.open(path)


def overwrite(path: Path, position: int, raw: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[position : position + len(raw)] = raw
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("position", "raw", "message"),
    [
        (0, b"MMIDIDY", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "version 2 with dtype code 8"),
        (17, b"\x09", "version 1 with dtype code 9; only version 1 with codes 1 to 8 is supported"),
        (17, b"\x00", "dtype code 0"),
        (18, struct.pack("<Q", 2**60), "but its counts need"),
        (18, struct.pack("<Q", 3), "but its counts need"),
        (26, struct.pack("<Q", 2**63), "but its counts need"),
        (34, struct.pack("<i", -1), "its pointers do not match its lengths"),
        (34, struct.pack("<i", 5), "the sequences are not stored back to back"),
        (34 + 16 + 8, struct.pack("<q", 8), "the sequences are not stored back to back"),
        (34 + 48, struct.pack("<q", 1), "document boundaries do not rise from 0 to 4"),
        (34 + 48 + 8, struct.pack("<q", 5), "document boundaries do not rise from 0 to 4"),
        (34 + 48 + 8, struct.pack("<q", -1), "document boundaries do not rise"),
        (34 + 48 + 16, struct.pack("<q", 3), "document boundaries do not rise"),
    ],
)
def test_a_megatron_index_that_makes_no_sense_is_refused(
    position: int, raw: bytes, message: str, tmp_path: Path
) -> None:
    path = write_megatron(tmp_path / "corpus", SEQUENCES, [0, 1, 4])
    overwrite(path, position, raw)
    with pytest.raises(FormatError, match=message) as caught:
        penstock.open(path)
    assert str(path) in str(caught.value)


@law
@given(st.data())
def test_any_bytes_in_a_megatron_index_give_nothing_but_our_errors(data: st.DataObject) -> None:
    with scratch() as folder:
        path = write_megatron(folder / "corpus", SEQUENCES, [0, 1, 4])
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        message = error_of(lambda: penstock.open(path)[:])
        assert message is None or "corpus" in message


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_half_a_megatron_pair_is_an_error(missing: str, tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "corpus", SEQUENCES, [0, 4])
    path.with_suffix(missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"corpus{missing}"):
        penstock.open(path, format="megatron")


def test_a_file_whose_name_tells_nothing_asks_for_its_format(tmp_path: Path) -> None:
    save_npy(tmp_path / "x", np.arange(3))
    with pytest.raises(FormatError, match=r"a file whose name does not say its format. Give format='npy'"):
        penstock.open(tmp_path / "x")
    assert len(penstock.open(tmp_path / "x", format="npy")) == 3
    with pytest.raises(ValueError, match="the choices are 'penstock', 'npy', 'raw', 'megatron', 'tar' and 'arrow'"):
        penstock.open(tmp_path / "x", format="parquet")  # type: ignore[arg-type]


def test_a_file_that_is_not_there_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(IncompleteDataset, match=r"x\.npy: no dataset is there"):
        penstock.open(tmp_path / "x.npy")


@pytest.mark.parametrize("options", [{"dtype": "uint16"}, {"shape": (-1,)}])
def test_a_type_is_not_given_to_a_file_that_has_one(options: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype=, shape= and offset= are for raw files"):
        penstock.open(save_npy(tmp_path / "x.npy", np.arange(3)), **options)


def test_a_dataset_folder_is_not_mistaken_for_a_neighbour(tmp_path: Path) -> None:
    write_megatron(tmp_path / "corpus", SEQUENCES, [0, 4])
    with penstock.DatasetWriter(tmp_path / "corpus", {"x": "int64"}) as writer:
        writer.write({"x": 5})
    assert list(penstock.open(tmp_path / "corpus").schema) == ["x"]


def test_links_to_foreign_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_npy(tmp_path / "blobs" / "8f2a", np.arange(3))
    (tmp_path / "x.npy").symlink_to(tmp_path / "blobs" / "8f2a")
    assert penstock.open(tmp_path / "x.npy")[:]["data"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["npy", "raw", "megatron"])
def test_a_large_value_is_a_read_only_view_of_the_file(kind: str, tmp_path: Path) -> None:
    ds = open_large(kind, tmp_path)
    name = next(iter(ds.schema))
    first, again = ds[0][name], ds[0][name]
    assert np.shares_memory(first, again)
    assert not first.flags.writeable
    del ds
    assert first.sum() == 0


def open_large(kind: str, folder: Path) -> penstock.Dataset:
    rows = np.zeros((4, 100_000), np.uint16)
    if kind == "megatron":
        return penstock.open(write_megatron(folder / "x", list(rows), [0, 1, 2, 3, 4]))
    if kind == "npy":
        return penstock.open(save_npy(folder / "x.npy", rows))
    rows.tofile(folder / "x.bin")
    return penstock.open(folder / "x.bin", dtype="uint16", shape=(-1, 100_000))


def test_opening_a_large_file_reads_none_of_it(tmp_path: Path) -> None:
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(1 << 40)  # a hole: a terabyte that takes no room
    ds = penstock.open(tmp_path / "x.bin", dtype="uint16", shape=(-1, 4096))
    assert len(ds) == 1 << 27
    assert ds.read([0, -1])["data"].sum() == 0


@pytest.mark.parametrize("kind", ["npy", "raw", "megatron"])
def test_a_foreign_dataset_pickles_as_its_path_and_notices_a_change(kind: str, tmp_path: Path) -> None:
    ds = open_large(kind, tmp_path)
    raw = pickle.dumps(ds)
    assert len(raw) < 600
    restored = pickle.loads(raw)
    assert restored.fingerprint == ds.fingerprint
    assert len(restored) == 4
    file = next(path for path in tmp_path.iterdir() if path.suffix in (".npy", ".bin"))
    overwrite(file, file.stat().st_size - 2, b"\x01\x01")
    with pytest.raises(DatasetChanged, match="the file changed since it was opened"):
        pickle.loads(raw)


SHRINK = """
    import os, sys, penstock
    from penstock.errors import StorageError
    path, options = sys.argv[1], eval(sys.argv[2])
    ds = penstock.open(path, **options)
    data = path.replace(".idx", ".bin")
    os.truncate(data, 4096)
    for read in (lambda: ds[3], lambda: ds[0], lambda: ds.read([0, 3]), lambda: ds[:], lambda: ds.fingerprint):
        try:
            read()
        except StorageError as error:
            assert data in str(error)
        else:
            sys.exit("noticed nothing")
    print("done")
"""


@pytest.mark.parametrize(
    "kind", ["megatron", *(pytest.param(kind, marks=pytest.mark.stress) for kind in ("npy", "raw"))]
)
def test_a_foreign_file_that_shrank_is_an_error_never_a_signal(kind: str, tmp_path: Path) -> None:
    open_large(kind, tmp_path)
    name, options = {
        "npy": ("x.npy", {}),
        "raw": ("x.bin", {"dtype": "uint16", "shape": (-1, 100_000)}),
        "megatron": ("x.idx", {}),
    }[kind]
    command = [sys.executable, "-c", textwrap.dedent(SHRINK), str(tmp_path / name), repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert issubclass(StorageError, OSError)


@pytest.mark.parametrize("header", ["2IH", "I", "<Q", "3s"])
def test_numbers_behind_a_header_made_with_struct_are_read_wherever_they_begin(tmp_path, header):
    values = np.arange(60, dtype=np.float32).reshape(12, 5)
    size = struct.calcsize(header)
    (tmp_path / "data.mmap").write_bytes(b"\xff" * size + values.tobytes())
    ds = penstock.open(tmp_path / "data.mmap", format="raw", dtype="float32", shape=(-1, 5), offset=size)
    assert np.array_equal(ds[:]["data"], values)
    assert np.array_equal(ds.read([7, 0, -1])["data"], values[[7, 0, -1]])
    assert np.array_equal(ds[3]["data"], values[3])
    batch = ds.cast(data="float64").shuffle(seed=1).batch(12).read(0)["data"]
    assert sorted(batch[:, 0].tolist()) == values[:, 0].tolist()
    again = pickle.loads(pickle.dumps(ds))
    assert np.array_equal(again[11]["data"], values[11])


def test_token_windows_of_a_file_with_a_header_are_those_of_one_without(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "plain.bin")
    (tmp_path / "header.bin").write_bytes(b"\x00" * 1025 + tokens.tobytes())
    plain = penstock.open(tmp_path / "plain.bin", dtype="uint16", column="tokens")
    behind = penstock.open(tmp_path / "header.bin", dtype="uint16", column="tokens", offset=1025)
    assert behind.fingerprint != plain.fingerprint
    two = penstock.open(tmp_path / "plain.bin", dtype="uint16", column="tokens", offset=2)
    assert two.fingerprint != plain.fingerprint
    plans = [each.shuffle(seed=3).window(16).batch(8) for each in (plain, behind)]
    assert np.array_equal(plans[0].read(2)["input_ids"], plans[1].read(2)["input_ids"])
    (tmp_path / "plan.toml").write_text(plans[1].to_toml())
    assert penstock.load_plan(tmp_path / "plan.toml").fingerprint == plans[1].fingerprint


def test_offsets_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(10))
    with pytest.raises(FormatError, match="8 bytes after its header of 2 are not a whole number of rows of 16"):
        penstock.open(tmp_path / "a.bin", dtype="float64", shape=(-1, 2), offset=2)
    with pytest.raises(FormatError, match="offset=11, but the file has 10 bytes"):
        penstock.open(tmp_path / "a.bin", dtype="uint8", offset=11)
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(ValueError, match="offset= are for raw files"):
        penstock.open(tmp_path / "a.npy", offset=4)
